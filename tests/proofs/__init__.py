"""Proofs of the identities that the operators and the passes rest on, for all real numbers.

The terms come from running the project's own functions on symbols (`symbols`). sympy differentiates, and z3 decides
(`equality`): it proves an identity, or gives numbers for which it fails. Each proof has a mutant that must fail.
"""
