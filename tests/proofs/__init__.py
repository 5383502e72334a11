"""Proofs of the identities that the operators and the passes rest on, for all real numbers.

The terms come from running the project's own functions on symbols (`symbols`). sympy differentiates (`calculus`). z3
decides (`equality`): it proves an identity, or gives numbers for which it fails. Formulas of whole graphs (`programs`)
have names for sums, so that equal ones are the same (`short`). Each proof has mutants that are refuted (`mutants`).
"""
