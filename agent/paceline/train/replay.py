"""Replay of the body of the script's loop up to its gradients.

`prove_first` replays it to check the loss (`paceline.train.proof`), and `profile_first` to time it
on batches of several sizes (`paceline.train.timed_trials`).

In a live run the loop must not have additional iterations: scripts count iterations, advance
schedules in them and accumulate gradients over them. So the replay finds the ``for`` statement that
requests the first batch from the loader. The replay runs the statements of that loop's body with a
copy of the loop's variables, until all wrapped models have gradients and an optimiser would step.
The copy is dropped afterwards.

The replay does not run a statement that could have a lasting effect, such as extending a list or
reading another loader. It skips such a statement and continues in two cases: the statement is only
a call that prints, or only a call that passes numbers to an object, such as a meter, and no
statement reads the object before the gradients are computed. In all other cases the replay ends
there, and if not all gradients are computed yet, the loss is not provable. Loops inside a library
are not replayed either. `paceline doctor` can check the loss even then, because it ends the script
afterwards.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import linecache
import logging
import os
import random
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paceline.core.errors import PacelineError
from paceline.core.trials import equal_share, most_samples
from paceline.train.profile import (
    FreeMemory,
    Outcome,
    Profile,
    exchange,
    limits_of,
    measure_with,
    shared_moments,
    shared_typical,
    spread,
)
from paceline.train.proof import WRONG, Loading, NotProvableError, ProofResult, Rehearsal, unknown
from paceline.train.stacks import is_users
from paceline.train.timed_trials import MOST_S, TimedTrials, reason

if TYPE_CHECKING:
    from paceline.train.state import TrainingState

logger = logging.getLogger(__name__)

_DEEPEST_CALLS = 6
_IMMUTABLE = (int, float, complex, str, bytes, bool, tuple, frozenset, type(None))
_REFUSED_BUILTINS = {"next", "input", "open", "exec", "eval", "setattr", "delattr", "print"}
_MUTATING = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear"),
    *("update", "add", "write", "writelines", "put", "get_nowait", "send", "recv", "save", "dump"),
    *("setdefault", "__next__", "__setitem__", "load_state_dict", "register_buffer", "set_epoch"),
    *("add_scalar", "add_scalars", "info", "warning", "debug", "log_metrics", "set_postfix"),
    *("set_description", "unscale_", "advance"),
    # Methods that enter a context manager in one statement and leave it in a later one, such as
    # `no_sync()` around several steps.
    *("enter_context", "push", "callback", "__enter__", "__exit__", "close"),
}
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HARMLESS = {"zero_grad", "backward", "train", "eval", "requires_grad_", "manual_seed"}


class _DoneError(BaseException):
    """End of the replay: all gradients are computed, and the rest of the body is not needed."""


class _LeftError(BaseException):
    """End of the replayed iteration by a ``continue``, ``break`` or ``return`` of the body."""


class _UnsafeError(Exception):
    """Reason why a statement is not run, worded to follow a line number such as "line 3"."""


def prove_first(state: TrainingState, loader: Loading, frame: FrameType) -> None:
    """Check the loss before the first step; if it is wrong, train with equal local batches.

    If local batches cannot become uneven, the loss is not checked. `frame` is the frame that
    requests the loader's first batch. A PacelineError means that the loss is wrong, and that a
    rank's limit is too low for equal local batches.
    """
    assert state.wiring is not None
    startup = state.startup
    # Limits that only a profile has found must not end a run that would train without a profile.
    limits = (state.findings.given_limits or state.context.limits).of_parts
    equal = equal_share(state.context.terms.global_batch, startup.world)
    has_room = not limits or min(limits) >= equal
    planned = state.context.planned
    if startup.world == 1 or startup.lanes is not None or (has_room and not planned):
        return
    loader.answer = answer = prove(state, loader, frame)
    if answer.verdict != WRONG:
        if startup.leads:
            sys.stderr.write(f"paceline: {answer.why} The check took {answer.cost_s:.2f} s.\n")
        return
    if not has_room:
        raise PacelineError(
            f"{answer.why} {answer.do} Or give Session(limits=…) of at least {equal} samples, so "
            "that all ranks can train with equal local batches."
        )
    logger.warning("all ranks train with equal local batches: %s %s", answer.why, answer.do)
    if state.wiring.leader is not None:
        profiled = state.findings.given_limits is not None
        state.wiring.leader.keep_equal(f"{answer.why} {answer.do}", ignore_limits=profiled)


def profile_first(state: TrainingState, loader: Loading, frame: FrameType) -> None:
    """Profile the ranks before training if the first policy uses profiles; all ranks call it.

    If a rank cannot be profiled, no rank has a profile, and rank 0 writes the reason. `frame` is
    the frame that requests the loader's first batch.
    """
    context, startup = state.context, state.startup
    policy = context.first_policy
    if startup.world == 1 or state.findings.profiles or policy is None or not policy.profiles:
        return
    began = time.perf_counter()
    profiles: list[Profile] = []
    if not (why := reason(context, startup.lanes, state.gate.models)):
        mine = _profiled(state, loader, frame)
        with state.waiting_in_trials():
            outcomes = exchange(startup.store, startup.rank, startup.world, mine)
        profiles = [each.profile for each in outcomes if each.profile is not None]
        why = next((f"rank {r}: {each.error}" for r, each in enumerate(outcomes) if each.error), "")
    if not why:
        batch, given = context.terms.global_batch, context.limits
        try:
            found = limits_of(given.samples, profiles, batch, startup.world, given.micro_batches)
            state.context = replace(context, limits=found)
            state.findings.profiles, state.findings.given_limits = profiles, given
        except PacelineError as error:
            why = str(error)
    if startup.leads:
        said = f"{policy.name} begins without a profile of the ranks, because {why}"
        if not why:
            said = f"{policy.name} has profiled {_listed(profiles, state.context.limits.samples)}"
        sys.stderr.write(f"paceline: {said}. That took {time.perf_counter() - began:.2f} s.\n")


def _listed(profiles: list[Profile], limits: list[int]) -> str:
    """Return the sizes that each rank has timed, and the ranks' limits."""
    ranks: dict[str, list[str]] = {}
    for rank, each in enumerate(profiles):
        sizes = ", ".join(str(samples) for samples, _ in each.times)
        limit = f" (limit {limits[rank]})" if limits else ""
        ranks.setdefault(f"{sizes} samples{limit}", []).append(str(rank))
    return "; ".join(
        f"{'rank' if len(of) == 1 else 'ranks'} {', '.join(of)} with {words}"
        for words, of in ranks.items()
    )


def _profiled(state: TrainingState, loader: Loading, frame: FrameType) -> Outcome:
    """Return this rank's profile, or the reason why it has none."""
    # Only some ranks may have received the signal, so this rank must report to the others.
    if state.asked_to_end:
        return Outcome(None, "the run was asked to end")
    context, startup = state.context, state.startup
    batch, world, limits = context.terms.global_batch, startup.world, context.limits.samples
    typical = shared_typical(startup.store, startup.sizes, most_samples(batch, world, None))
    hold = context.device.trial(
        state.progress.step + 1, shared_moments(startup.store, startup.sizes)
    )
    body = _Body()
    trials = TimedTrials(state, loader, body.at_step, body.after_backward)
    body.rehearsal = trials

    def time_batch(samples: int) -> float:
        return trials.time(spread(typical, samples), body.run_again, hold)

    own = most_samples(batch, world, limits[startup.rank] if limits else None)
    share = min(own, equal_share(batch, world))
    memory = FreeMemory(int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    try:
        body.find(frame, loader)
        with state.statistics.kept():
            profile = measure_with(
                time_batch, own, share=share, most_s=MOST_S, has_room=memory.has_room
            )
    except NotProvableError as error:
        return Outcome(None, str(error))
    # The script's own code may raise any error on a batch of another size.
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}")
    finally:
        body.forget()
        del frame
        _release_memory()
    if profile.limit is None and (not profile.times or profile.times[-1][0] < share):
        if memory.is_short:
            return Outcome(None, "an equal share of a step may need more than the free memory")
        return Outcome(None, f"an equal share of a step takes too long for {MOST_S:g} s of trials")
    return Outcome(profile)


def prove(state: TrainingState, loader: Loading, frame: FrameType) -> ProofResult:
    """Check the loss of the loop that reads a loader; all ranks call it.

    `frame` is the frame that requests the loader's first batch.
    """
    body = _Body()
    rehearsal = Rehearsal(state, loader, body.at_step, body.after_backward)
    body.rehearsal = rehearsal
    batches = rehearsal.batches()
    try:
        batch = next(batches, None)
        while rehearsal.answer is None:
            try:
                body.find(frame, loader)
                body.run(batch)
            except Exception as error:
                batch = batches.throw(error)
            else:
                batch = next(batches)
    except StopIteration:
        pass
    finally:
        batches.close()
        # Drop all references, so that the script's objects do not stay in memory until the next
        # garbage collection.
        body.forget()
        del frame
        _release_memory()
    return rehearsal.answer or unknown("the script left the loop")


def _release_memory() -> None:
    """Return the trials' memory to the system, so that it does not add to the training's peak."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # glibc keeps freed memory in pieces that are too small for a step's tensors, so return them.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _Body:
    rehearsal: Rehearsal

    def __init__(self) -> None:
        self._loop: ast.For | None = None
        self._file = ""
        self._names: dict[str, Any] = {}
        self._item: Any = None
        self._passes = 0
        # Number of backward passes in the functions that the current statement calls.
        self._inside = 0
        # The statements that the last `run` executed, each with its `_inside`.
        self._executed: list[tuple[CodeType, int]] = []

    def find(self, frame: FrameType, loader: Any) -> None:
        if self._loop is not None:
            return
        user: FrameType | None = frame
        while user is not None and not is_users(user.f_code.co_filename):
            user = user.f_back
        if user is None:
            raise NotProvableError("a library runs the loop")
        self._file = user.f_code.co_filename
        names = {**user.f_globals, **user.f_locals}
        line = user.f_lineno
        for node in ast.walk(_tree(self._file)):
            if not isinstance(node, ast.For):
                continue
            if node.iter.lineno <= line <= (node.iter.end_lineno or node.iter.lineno):
                item = _item(node.iter, names, loader)
                if item is not None:
                    self._loop, self._names, self._item = node, names, item
                    return
        raise NotProvableError("the loop is not a for statement over session.loader()")

    def run(self, batch: Any) -> None:
        """Run the body on a batch until all gradients are computed.

        Errors of the script are raised unchanged. A NotProvableError means that a statement would
        have a lasting effect before all gradients are computed.
        """
        assert self._loop is not None
        names = self._begin(batch)
        self._executed.clear()
        take = ast.Assign([self._loop.target], ast.Name("__paceline_item__", ast.Load()))
        self._exec(take, names)
        local = _names_in(self._loop.target)
        # For each variable that a skipped statement would change: the reason why the statement was
        # skipped.
        left_out = dict[str, str]()
        following = deque(self._loop.body)
        while following:
            statement = following.popleft()
            why = ""
            try:
                self._inside = _check([statement], names, local)
            except _UnsafeError as unsafe:
                why = f"line {statement.lineno} {unsafe}"
            if why and self.rehearsal.complete:
                return
            if isinstance(statement, ast.If) and why and _is_safe(statement.test, names, local):
                why = _first_read(statement.test, names, left_out)
                if not why:
                    taken = self._value(statement.test, names)
                    following.extendleft(reversed(statement.body if taken else statement.orelse))
                    continue
            elif why and (root := self._changed(statement, names, local)) is not None:
                left_out |= {root: why} if root else {}
                continue
            why = why or _first_read(statement, names, left_out)
            if why and self.rehearsal.complete:
                return
            if why:
                raise NotProvableError(why)
            try:
                self._exec(_LeavingByError().visit(_copied(statement)), names)
            except _DoneError:
                return
            except _LeftError:
                break
            local |= _made(statement, local)
        if not self.rehearsal.complete:
            raise NotProvableError(
                "an iteration of the loop computes no gradient of a wrapped model"
            )

    def run_again(self, batch: Any) -> None:
        """Run the statements of the last `run` without checking them; the first time, `run`.

        So the statements' own time can be measured. Errors are those of `run`.
        """
        if not self._executed:
            self.run(batch)
            return
        names = self._begin(batch)
        for code, inside in self._executed:
            self._inside = inside
            try:
                exec(code, names)
            except (_DoneError, _LeftError):
                break
        if not self.rehearsal.complete:
            raise NotProvableError("the loop computes its gradients only in some iterations")

    def _begin(self, batch: Any) -> dict[str, Any]:
        self._passes = self._inside = 0
        item = self._item(batch)
        return {**self._names, "__paceline_item__": item, "__paceline_left__": _LeftError}

    def _changed(self, statement: ast.stmt, names: dict[str, Any], local: set[str]) -> str | None:
        """Return the variable that a statement changes, if the statement may be skipped.

        Only calls that cannot compute gradients may be skipped. Return "" if the statement is a
        call that only prints, and None if it may not be skipped.
        """
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            return None
        call = statement.value
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if not all(_is_safe(each, names, local) for each in given):
            return None
        if isinstance(call.func, ast.Name):
            return "" if _resolved(call.func, names) is print else None
        root = _root(call.func)
        if root is None or not isinstance(call.func, ast.Attribute):
            return None
        if isinstance(_resolved(call.func.value, names), _CONTAINERS):
            return root
        # A call that gets only numbers, and neither the batch nor the loss, cannot compute
        # gradients.
        return root if given and all(_is_plain(self._value(e, names)) for e in given) else None

    def _value(self, expression: ast.expr, names: dict[str, Any]) -> Any:
        code = ast.Expression(expression)
        return eval(compile(code, self._file, "eval", dont_inherit=True), names)

    def _exec(self, statement: ast.stmt, names: dict[str, Any]) -> None:
        module = ast.fix_missing_locations(ast.Module([statement], []))
        code = compile(module, self._file, "exec", dont_inherit=True)
        self._executed.append((code, self._inside))
        exec(code, names)

    def forget(self) -> None:
        self._names, self._item = {}, None
        self._executed.clear()
        del self.rehearsal

    def at_step(self) -> None:
        if self.rehearsal.complete:
            raise _DoneError

    def after_backward(self) -> None:
        """Count a backward pass; end the replay after the last pass of the current statement."""
        self._passes += 1
        if self._inside and self._passes >= self._inside:
            if self.rehearsal.complete:
                raise _DoneError
            raise NotProvableError(
                "the function that computes the first gradients does not compute the gradients of "
                "all wrapped models"
            )


class _LeavingByError(ast.NodeTransformer):
    """Transformer that makes `continue`, `break` and `return` of the body raise `_LeftError`."""

    def _raise(self, node: ast.stmt) -> ast.stmt:
        left = ast.Raise(ast.Name("__paceline_left__", ast.Load()), None)
        return ast.copy_location(left, node)

    visit_Continue = visit_Break = visit_Return = _raise  # noqa: N815

    def _keep(self, node: ast.AST) -> ast.AST:
        return node

    visit_For = visit_While = visit_AsyncFor = _keep  # noqa: N815
    visit_FunctionDef = visit_Lambda = visit_ClassDef = visit_AsyncFunctionDef = _keep  # noqa: N815


def _copied(statement: ast.stmt) -> ast.stmt:
    copy = ast.parse(ast.unparse(statement)).body[0]
    return ast.increment_lineno(copy, statement.lineno - 1)


_trees: dict[str, ast.Module] = {}


def _tree(file: str) -> ast.Module:
    if file not in _trees:
        try:
            _trees[file] = ast.parse("".join(linecache.getlines(file)))
        # The source may not be plain Python, for example in a notebook's cell.
        except SyntaxError as error:
            raise NotProvableError(f"{file} cannot be read") from error
    return _trees[file]


def _item(iterated: ast.expr, names: Mapping[str, Any], loader: Any) -> Any:
    """Return a function that converts a batch to the value of the loop's target.

    Return None if the loop does not iterate over this loader.
    """
    if isinstance(iterated, ast.Name | ast.Attribute):
        return (lambda batch: batch) if _resolved(iterated, names) is loader else None
    if not isinstance(iterated, ast.Call) or not iterated.args:
        return None
    inner = _item(iterated.args[0], names, loader)
    if inner is None:
        return None
    called = iterated.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name == "enumerate":
        start = iterated.args[1] if len(iterated.args) > 1 else None
        start = next((k.value for k in iterated.keywords if k.arg == "start"), start)
        first = start.value if isinstance(start, ast.Constant) else 0
        return lambda batch: (first, inner(batch))
    return inner if name == "tqdm" else None


_MISSING = object()


def _resolved(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the object that a name or a chain of attributes refers to, or `_MISSING`."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id, vars(builtins).get(expression.id, _MISSING))
    if isinstance(expression, ast.Attribute):
        owner = _resolved(expression.value, names)
        if owner is _MISSING:
            return _MISSING
        # Reading a property would run code of the script.
        if isinstance(getattr(type(owner), expression.attr, None), property):
            return _MISSING
        try:
            return getattr(owner, expression.attr, _MISSING)
        # The script's own `__getattr__` may raise any error.
        except Exception:
            return _MISSING
    return _MISSING


def _names_in(target: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


def _made(statement: ast.stmt, local: set[str]) -> set[str]:
    """Return the names that a statement assigns, unless they alias objects that existed before."""
    made = set[str]()
    for node in ast.walk(statement):
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        alias = isinstance(value, ast.Name | ast.Attribute | ast.Subscript)
        if not alias or _root(value) in local | made:
            for target in node.targets:
                if isinstance(target, ast.Name | ast.Tuple | ast.List):
                    made |= _names_in(target)
    return made


def _root(expression: ast.expr) -> str | None:
    while isinstance(expression, ast.Attribute | ast.Subscript | ast.Starred):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def _check(
    statements: list[ast.stmt],
    names: Mapping[str, Any],
    local: set[str],
    seen: frozenset[CodeType] = frozenset(),
) -> int:
    """Check that statements have no lasting effect except assignments to names.

    Return the number of backward passes in the functions of the script that the statements call.
    `local` contains the names assigned so far, and `seen` the functions that are being checked,
    so that recursion ends.
    """
    inside, local = 0, set(local)
    for statement in statements:
        local |= _made(statement, local)
        for node in ast.walk(statement):
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise _UnsafeError("assigns a global or nonlocal name")
            if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
                raise _UnsafeError("yields or awaits")
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
                _check_assignment(node, names, local, seen)
            if isinstance(node, ast.Call):
                inside += _check_call(node, names, local, seen)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(
                _resolved(node, names), _GENERATORS
            ):
                raise _UnsafeError(f"draws random numbers from {ast.unparse(node)}")
    return inside


def _is_safe(expression: ast.expr, names: Mapping[str, Any], local: set[str]) -> bool:
    if any(isinstance(node, ast.NamedExpr | ast.Starred) for node in ast.walk(expression)):
        return False
    try:
        return _check([ast.copy_location(ast.Expr(expression), expression)], names, local) == 0
    except _UnsafeError:
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad
    if isinstance(value, dict | list | tuple):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float | str | np.number | None)


def _first_read(node: ast.AST, names: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    """Return why a variable that `node` reads has no correct value; "" if each has one.

    `left_out` maps each variable that a skipped statement would change to the reason for skipping.
    """
    read = _read(node, names) if left_out else set()
    return next((why for name, why in left_out.items() if name in read), "")


def _read(node: ast.AST, names: Mapping[str, Any]) -> set[str]:
    expressions = [e for e in ast.walk(node) if isinstance(e, ast.Name | ast.Attribute)]
    read = {each.id for each in expressions if isinstance(each, ast.Name)}
    functions = [_users_function(_resolved(each, names)) for each in expressions]
    seen = set[CodeType]()
    while functions:
        function = functions.pop()
        if function is None or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        codes = [function.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            read.update(code.co_names, code.co_freevars)
            functions += [_users_function(function.__globals__.get(n)) for n in code.co_names]
    return read


def _users_function(value: Any) -> FunctionType | None:
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, FunctionType | nn.Module | type):
        value = type(value).__call__ if callable(value) else None
    is_function = isinstance(value, FunctionType) and is_users(value.__code__.co_filename)
    return value if is_function else None


def _check_assignment(
    node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete,
    names: Mapping[str, Any],
    local: set[str],
    seen: frozenset[CodeType],
) -> None:
    value = getattr(node, "value", None)
    if value is not None and _ends_in(value, names, local, seen):
        return
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(
                each.ctx, ast.Load
            ):
                root = _root(each)
                if root not in local:
                    raise _UnsafeError(f"changes {ast.unparse(each)}")
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        value = names.get(node.target.id, 0)
        if not isinstance(value, _IMMUTABLE):
            raise _UnsafeError(f"changes {node.target.id}")


def _ends_in(
    value: ast.AST, names: Mapping[str, Any], local: set[str], seen: frozenset[CodeType]
) -> bool:
    """Return True if a call in `value` has a backward pass, so that the replay ends in the call."""
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
    return any(_check_call(call, names, local, seen) > 0 for call in calls)


def _check_call(
    node: ast.Call, names: Mapping[str, Any], local: set[str], seen: frozenset[CodeType]
) -> int:
    called = _resolved(node.func, names)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _REFUSED_BUILTINS and called is vars(builtins)[name]:
        raise _UnsafeError(f"calls {name}()")
    ends = any(_ends_in(argument, names, local, seen) for argument in node.args)
    if isinstance(node.func, ast.Attribute) and not ends:
        _check_method(node.func, names, local)
    function = _users_function(called)
    if function is None or function.__code__ in seen:
        return 0
    if isinstance(called, MethodType) and isinstance(called.__self__, nn.Module):
        return 0
    if len(seen) >= _DEEPEST_CALLS:
        raise _UnsafeError(f"calls {function.__qualname__}, and the calls are nested too deeply")
    return _check_function(function, seen)


def _check_method(method: ast.Attribute, names: Mapping[str, Any], local: set[str]) -> None:
    name, root = method.attr, _root(method.value)
    owner = _resolved(method.value, names)
    own = root in local
    if name == "step" and not isinstance(owner, torch.optim.Optimizer):
        raise _UnsafeError(f"calls {ast.unparse(method)}()")
    if name in _HARMLESS or own or type(owner).__module__.startswith("paceline."):
        return
    in_place = name.endswith("_") and not name.endswith("__") and root is not None
    if name in _MUTATING or in_place:
        raise _UnsafeError(f"calls {ast.unparse(method)}()")


def _check_function(function: FunctionType, seen: frozenset[CodeType]) -> int:
    """Check a script's function up to its last backward pass.

    Return the number of backward passes in the function and in the functions that it calls.
    """
    code = function.__code__
    nodes = [
        node
        for node in ast.walk(_tree(code.co_filename))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        and code.co_firstlineno in (node.lineno, *(d.lineno for d in _decorators(node)))
    ]
    if not nodes:
        raise _UnsafeError(f"calls {function.__qualname__}, whose source is not found")
    closed = zip(code.co_freevars, function.__closure__ or (), strict=False)
    cells = {name: cell.cell_contents for name, cell in closed if _is_filled(cell)}
    names = {**function.__globals__, **cells}
    passes = 0
    for node in nodes:
        arguments = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        visible = {name: value for name, value in names.items() if name not in arguments}
        visible |= dict.fromkeys(arguments, _MISSING)
        body: list[ast.stmt] = (
            [ast.copy_location(ast.Expr(node.body), node)]
            if isinstance(node, ast.Lambda)
            else node.body
        )
        own = [_backward_passes(statement) for statement in body]
        if any(own):
            body = body[: max(k for k, number in enumerate(own) if number) + 1]
        passes += sum(own) + _check(body, visible, set(), seen | {code})
    return passes


def _decorators(node: ast.FunctionDef | ast.Lambda) -> list[ast.expr]:
    return [] if isinstance(node, ast.Lambda) else node.decorator_list


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _backward_passes(statement: ast.stmt) -> int:
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        for node in ast.walk(statement)
    )
