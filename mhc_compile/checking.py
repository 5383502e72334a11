"""`options={"mhc.check": True}`: in the first calls of a compiled graph each of its sites is checked alone.

In these calls the program runs as it was written, and each site is a function. The function computes the program's own
code, the site's operator, and the exact result: the program's code in float64. The backward pass does the same with the
incoming gradients. `testing.judge` compares the errors, as in `verify`. Results and gradients of these calls are those
of the program's own code, whatever the operators compute.

If an operator is less accurate, its site is left alone from then on in this process: its name is noted, and Dynamo
compiles the graph again, without it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mhc_compile import compat, passes, records
from mhc_compile.agreement import Ballot, attempt, digest, structure
from mhc_compile.guard import described, guard
from mhc_compile.passes.report import SiteReport, location
from mhc_compile.passes.site_modules import Alone
from mhc_compile.passes.widened import widened
from mhc_compile.testing.judging import Errors, judge

log = logging.getLogger(__name__)

# So many calls are checked, with their gradients if their results have any.
CALLS = 3
# After so many the check ends in any case. A call whose gradients may still come is none of these.
MOST_CALLS = 16

_NOT_YET = "the first calls are not over, in which the program's own code runs"
_REENTRANT = (
    "it draws random numbers inside an autograd.Function, as with checkpointing by use_reentrant=True, and what is "
    "repeated has to draw the same ones"
)
_AHEAD = "its function is compiled ahead of time, and has no first calls"

# The autocasts that are on, as `compat.autocast_state` tells them.
Autocasts = tuple[tuple[str, torch.dtype], ...]

# Why sites are left alone, by their names, by the kind of their graph.
_left: dict[str, dict[str, str]] = {}


_LEFT = "mhc_left_alone"


def note_left_alone(module: fx.GraphModule) -> None:
    """Note with a graph, and with those that it calls, which sites are left alone.

    Inductor's own passes, which may come before ours, change a graph, so that it is of another kind then.
    """
    for part in module.modules() if _left else ():
        if isinstance(part, fx.GraphModule):
            part.meta[_LEFT] = _left.get(_kind(part.graph), {})


def left_alone(graph: fx.Graph) -> dict[str, str]:
    """Why sites of a graph are left alone, by their names: as it was noted, or as it is for graphs of this kind."""
    if not _left:
        return {}
    noted: dict[str, str] | None = getattr(graph.owning_module, "meta", {}).get(_LEFT)
    return _left.get(_kind(graph), {}) if noted is None else noted


def _kind(graph: fx.Graph) -> str:
    """Equal for graphs of one structure and the same floats: with another eps an operator may be less accurate."""
    arguments = tree_leaves([(node.args, node.kwargs) for node in graph.nodes])
    return digest(" ".join([structure(graph), *(repr(value) for value in arguments if isinstance(value, float))]))


def all_left_alone() -> tuple[tuple[str, str], ...]:
    """Every site that is left alone, for the keys of caches."""
    return tuple(sorted((graph, name) for graph, sites in _left.items() for name in sites))


def forget() -> None:
    """Leave no site alone any longer."""
    _left.clear()


class Check:
    """One site: the function that the program calls in its place, and what is known about its operator."""

    def __init__(self, part: Alone, kind: str, calls: FirstCalls) -> None:
        self.name = passes.site_name(part.site)
        self.report = SiteReport(part.site.op, location(part.outputs[0]), "")
        self.kind = kind
        self._calls = calls
        self._program, self._operator, self._exact = part.program, part.operator, widened(part.program)
        self._inputs = [node.name for node in part.inputs]
        self._outputs = [f"output {node.name}" for node in part.outputs]
        self.differentiable = [compat.example(node).requires_grad for node in part.outputs]
        self._trusted, self._found = Errors(), Errors()
        self.failure: str | None = None
        self._raised: str | None = None
        # fx writes the names of functions into its code.
        self.__name__ = self.__qualname__ = f"check_{part.outputs[0].name}"

    def __call__(self, autocasts: Autocasts, *inputs: Any) -> Any:
        return _Watched.apply(self, autocasts, *inputs)  # type: ignore[no-untyped-call]

    def forward(self, autocasts: Autocasts, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The program's results for these inputs, and a comparison of the operator with them."""

        def evaluate(module: Any, values: Sequence[Any]) -> tuple[Tensor, ...]:
            return _results(module, autocasts, values)

        found = evaluate(self._program, inputs)
        if self._calls.checking and self.failure is None:
            with self._telling():
                self._compare(self._outputs, found, evaluate, inputs)
        return found

    def backward(
        self,
        autocasts: Autocasts,
        inputs: Sequence[Any],
        needs: Sequence[bool],
        gradients: Sequence[Any],
        call: _Call,
    ) -> list[Tensor | None]:
        """The program's gradients of those inputs that need one, and a comparison of the operator's with them."""
        found = _gradients(self._program, autocasts, inputs, needs, gradients)
        if self._calls.checking and self.failure is None:
            names = [f"gradient of {name}" for name, need in zip(self._inputs, needs, strict=True) if need]
            leaves = [value for value, need in zip(inputs, needs, strict=True) if need]

            def evaluate(module: Any, values: Sequence[Any]) -> list[Tensor]:
                given = [None if g is None else g.double() if module is self._exact else g for g in gradients]
                return _filled(_gradients(module, autocasts, values, needs, given), leaves)

            with self._telling():
                if self._compare(names, _filled(found, leaves), evaluate, inputs):
                    self._calls.count(call)
        if self.failure is not None:
            self._calls.count(call)
        self._calls.came(call)
        return found

    def _compare(
        self,
        names: Sequence[str],
        program: Sequence[Tensor],
        evaluate: Callable[[Any, Sequence[Any]], Sequence[Tensor]],
        inputs: Sequence[Any],
    ) -> bool:
        """Returns whether there was something to compare."""
        exact = evaluate(self._exact, [_double(value) for value in inputs])
        if not all(bool(value.isfinite().all()) for value in (*program, *exact)):
            return False  # a loss that was scaled too far, say
        try:
            ours = evaluate(self._operator, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._raised = f"when checked, its operator raised {described(error)}"
            return True
        reference = dict(zip(names, exact, strict=True))
        with self._calls.lock:
            self._trusted.add(dict(zip(names, program, strict=True)), reference)
            self._found.add(dict(zip(names, ours, strict=True)), reference)
        return True

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """An error while an operator is compared ends the check of its site. The report names the error."""
        try:
            yield
        except Exception as error:
            self.failure = described(error)
            log.debug("where this failed", exc_info=error)

    def verdict(self) -> str | None:
        """Why the site is to be left alone; None if its operator is as accurate as the program."""
        if self._raised is not None:
            return self._raised
        names = list(self._found.numbers)
        outputs = [name for name in names if name in self._outputs]
        gradients = [name for name in names if name not in self._outputs]
        findings = []
        for group, members in (("outputs", outputs), ("gradients", gradients)):
            if members:
                findings += judge(self._trusted, self._found, members, group, vanishing=group == "gradients")
        failed = [finding for finding in findings if not finding.ok]
        # Rather of one tensor than of several together.
        worst = max(failed, key=lambda f: (len(f.names) == 1, f.excess), default=None)
        return None if worst is None else f"when checked, its operator was less accurate than this code: {worst}"

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.failure is None and bool(self._found.numbers or self._raised)


class _Watched(torch.autograd.Function):
    """A site of the program, which keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, check: Check, autocasts: Autocasts, *inputs: Any) -> Any:
        outputs = tuple(map(compat.no_view, check.forward(autocasts, inputs)))  # the program may write into them
        ctx.set_materialize_grads(False)
        ctx.check, ctx.call, ctx.autocasts = check, check._calls.current.call, autocasts
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        fixed = [out for out, has in zip(outputs, check.differentiable, strict=True) if not has]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [other if saved is None else saved for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        needs = ctx.needs_input_grad[2:]
        found = iter(ctx.check.backward(ctx.autocasts, inputs, needs, gradients, ctx.call))
        return (None, None, *(next(found) if need else None for need in needs))


def _results(module: Any, autocasts: Autocasts, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Those of a site's module, which sets autocast as its graph does, from the graph's beginning on.

    So it has to begin under the autocasts of that beginning, whatever is on at the site's call.
    """
    with compat.under_autocast(autocasts):
        return module(*inputs)  # type: ignore[no-any-return]


def _gradients(
    module: Any,
    autocasts: Autocasts,
    inputs: Sequence[Any],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The site's code is differentiated under what is on in the backward pass, as eager code is."""
    given = [v.detach().requires_grad_(n) if isinstance(v, Tensor) else v for v, n in zip(inputs, needs, strict=True)]
    with torch.enable_grad():
        outputs = _results(module, autocasts, given)
    arrived = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    leaves = [value for value, need in zip(given, needs, strict=True) if need]
    if not arrived or not leaves:
        return [None] * len(leaves)
    made, sent = zip(*arrived, strict=True)
    return list(torch.autograd.grad(made, leaves, sent, allow_unused=True))


def _filled(gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class _Call:
    """One call of a graph. Autograd keeps it as long as its gradients may come."""

    counts = False


class _Current(threading.local):
    """The call that a thread is in; one that counts for nothing between calls."""

    def __init__(self) -> None:
        self.call = _Call()


class FirstCalls:
    """What Dynamo calls for a graph: the program with its checks at first, later the compiled graph.

    Checkpointing repeats a call in the backward pass, and what is saved then has to be the same. So a call that repeats
    another one runs the program, and does not count. The compiled graph takes over when no call can be repeated.
    """

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.unchecked: list[SiteReport] = []
        self.errors: list[str] = []
        self.current = _Current()
        self.checking = True
        self.lock = threading.RLock()
        self._begun = self._ended = self._counted = 0
        # Calls whose gradients may come, and calls that may be repeated.
        self._open: WeakSet[_Call] = WeakSet()
        self._repeatable: WeakSet[_Call] = WeakSet()
        self._run: Callable[..., Any] | None = None
        self._agreed: dict[int, str] | None = None
        self._is_outdated = self._is_dropped = self.draws = False

    def start(
        self, program: fx.GraphModule, ballot: Ballot, compiled: Callable[..., Any], entry: records.Compiled
    ) -> Callable[..., Any]:
        """The program with its checks, and the graph to call if the checks find nothing, with its entry in the records.

        The latter has just been compiled.
        """
        with guard("sites are not checked", entry.traced.errors):
            if not entry.report().rewritten:
                return self.leave(compiled, entry)
            again = compat.compilation_again()
            if again is None:
                self.unchecked += [replace(check.report, reason=_AHEAD) for check in self.checks]
                return self.leave(compiled, entry)
            self._program, self._compiled, self._ballot = program, compiled, ballot
            self._compile_again, self._entry = again, entry
            entry.traced.errors += [error for error in self.errors if error not in entry.traced.errors]
            entry.checked.unchecked = [replace(check.report, reason=_NOT_YET) for check in self.checks]
            return self
        return compiled

    def leave(self, compiled: Callable[..., Any], entry: records.Compiled) -> Callable[..., Any]:
        """The compiled graph itself, in which nothing is checked: the report says why, if there are operators."""
        if not entry.report().rewritten:
            self.unchecked.clear()
        entry.traced.errors += [error for error in self.errors if error not in entry.traced.errors]
        entry.checked.unchecked = list(self.unchecked)
        for reason, count in Counter(site.reason for site in self.unchecked).items():
            log.warning("%s hyper-connection sites are not checked: %s", count, reason)
        return compiled

    def __call__(self, *args: Any) -> Any:
        return self._first(*args) if self._run is None else self._run(*args)

    def _first(self, *args: Any) -> Any:
        call, saves_by_hooks, in_backward = _Call(), compat.saves_by_hooks(), compat.current_backward() >= 0
        is_repeated = saves_by_hooks and in_backward
        with self.lock:
            if not is_repeated:
                hidden = self.draws and (in_backward or not torch.is_grad_enabled()) and compat.is_in_function()
                if hidden and self._run is None and not self._is_outdated:
                    self._give_up()
                with guard("the program runs once more as it was written"):
                    self._decide()
                self._begun += 1
                if saves_by_hooks:
                    self._repeatable.add(call)
                self._compile_anew()
            run = self._run or partial(self._checked, call, self._program)
        try:
            outputs = run(*args)
        except BaseException:
            # Nothing repeats it, and who keeps the error would keep the call.
            with self.lock:
                self._repeatable.discard(call)
            raise
        if not is_repeated:
            with self.lock:
                self._ended += 1
                if any(isinstance(out, Tensor) and out.requires_grad for out in outputs):
                    self._open.add(call)
                else:
                    self.count(call)
        return outputs

    def _checked(self, call: _Call, program: fx.GraphModule, *args: Any) -> Any:
        before, self.current.call = self.current.call, call
        try:
            return program(*args)
        finally:
            self.current.call = before

    def count(self, call: _Call) -> None:
        """All of a call has been compared that will be."""
        with self.lock:
            self._counted += not call.counts
            call.counts = True

    def came(self, call: _Call) -> None:
        """Gradients of a call have come."""
        with self.lock:
            self._open.discard(call)
            if compat.is_last_backward():
                self._repeatable.discard(call)
                self._compile_anew()

    def _decide(self) -> None:
        """Before a call: whether enough was seen, here and on other ranks. All ranks ask before each call."""
        if self._is_outdated or self._run is not None:
            return
        if self._agreed is None:
            is_last = self._ended - len(self._open) >= MOST_CALLS
            if self.checking and (self._counted >= CALLS or is_last):
                self.checking = False
                self._ballot.post(self._verdicts())
            self._agreed = self._ballot.outcome(self._begun, is_last=is_last, holds=bool(self._repeatable))
        if self._agreed is not None and not self._repeatable:
            self._settle(self._agreed)

    def _give_up(self) -> None:
        """Check nothing: a call is repeated by another graph, which has first calls of its own."""
        self.checking = False
        self._run = self._compiled
        self._entry.checked.unchecked = [replace(check.report, reason=_REENTRANT) for check in self.checks]

    def _compile_anew(self) -> None:
        """Have Dynamo compile the graph again, without the sites that are left alone."""
        if self._is_outdated and not self._is_dropped and not self._repeatable:
            self._is_dropped = True
            if not self._compile_again():
                log.warning("a graph with sites that are left alone stays uncompiled: it cannot be compiled again")

    def _verdicts(self) -> dict[int, str]:
        found = ((index, check.verdict()) for index, check in enumerate(self.checks))
        return {index: reason for index, reason in found if reason is not None}

    def _settle(self, found: dict[int, str]) -> None:
        """Switch to the compiled graph, or note that it has to be compiled again without sites."""
        for index, reason in found.items():
            check = self.checks[index]
            _left.setdefault(check.kind, {})[check.name] = reason
            log.warning("%s at %s is left alone: %s", check.report.op, check.report.location, reason)
        if found:
            self._is_outdated = True
            self._entry.discard()
        else:
            with guard("the check is not in the report"):
                self._tell()
            self._run = self._compiled
            del self._program, self.checks

    def _tell(self) -> None:
        report = self._entry.checked
        report.unchecked.clear()
        report.checked.update(check.report.op for check in self.checks if check.compared)
        for check in self.checks:
            if not check.compared:
                reason = check.failure or "its values were not finite in any call"
                report.unchecked.append(SiteReport(check.report.op, check.report.location, "", reason))
        report.unchecked += self.unchecked


# What makes of a graph's compiled form, and its entry in the records, the one that Dynamo calls.
Instead = Callable[[Callable[..., Any], records.Compiled], Callable[..., Any]]


def nothing(compiled: Callable[..., Any], entry: records.Compiled) -> Callable[..., Any]:
    """The compiled graph itself."""
    return compiled


def prepare(module: fx.GraphModule, *, input_norms: bool | None) -> Instead:
    """A function that makes of a compiled Dynamo graph one whose sites are checked in its first calls.

    Call it before the graph is compiled, because it uses the graph as it is now. If there is no site to check, the
    function returns the compiled graph itself.
    """
    first = FirstCalls()

    def change() -> fx.GraphModule | None:
        passes.look_at_calls(module)
        first.draws = any(map(compat.draws_random_numbers, module.graph.nodes))
        program = _watched(module, first, first.errors, input_norms)
        return program if first.checks else None

    program = attempt("checking", module.graph, first.errors, change, lambda: None)
    if program is None:
        return first.leave
    return partial(first.start, program, Ballot(module.graph, len(first.checks)))


def _watched(module: fx.GraphModule, first: FirstCalls, errors: list[str], input_norms: bool | None) -> fx.GraphModule:
    """A copy of a graph and of those nested in it, in which every site is a check."""

    kind = _kind(module.graph)

    def check(part: Alone) -> Check:
        return Check(part, kind, first)

    graph = module.graph
    apart = passes.apart(graph, check, errors, input_norms=input_norms, left=_left.get(kind, {}))
    if apart is None:
        graph, _ = compat.copy_graph(graph)
    else:
        graph = apart.graph
        _give_autocasts(graph, apart.functions)
        first.checks += apart.functions
        first.unchecked += apart.whole
    regions = compat.call_regions(graph)
    made = compat.module_of(graph, module)
    for name in sorted(regions):
        setattr(made, name, _watched(getattr(module, name), first, errors, input_norms))
    for name in sorted({name for node in graph.nodes for name in compat.names_of_bodies(node)} - regions):
        first.unchecked += _unchecked(getattr(module, name), errors, input_norms)
    return made


def _give_autocasts(graph: fx.Graph, checks: Sequence[Check]) -> None:
    """Give checks the autocasts that are on where a call of their graph begins; that of a nested graph, too."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        autocasts = graph.call_function(compat.autocast_state)
    known = set(map(id, checks))
    for node in graph.nodes:
        if id(node.target) in known:
            node.args = (autocasts, *node.args)


def _unchecked(body: fx.GraphModule, errors: list[str], input_norms: bool | None) -> list[SiteReport]:
    """The sites of a nested graph that only its operator runs, such as a branch of `torch.cond`."""
    apart = passes.apart(body.graph, partial(Check, kind="", calls=FirstCalls()), errors, input_norms=input_norms)
    checks = apart.functions if apart is not None else []
    return [replace(check.report, reason="it is in a nested graph that runs as a whole") for check in checks]
