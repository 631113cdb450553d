"""Cuts a model that is no plain ``nn.Sequential`` into stages, by the graph of operations that torch.export records.

A stage has the operations from the first one of its first layer on. What later stages need of earlier ones goes through all
stages between them. The model is recorded in both modes, because torch.export keeps the operations of one only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hvdlite.errors import ArgumentError
from hvdlite_torch.pipeline.faithful import faithfully
from hvdlite_torch.pipeline.tied import differing

Values = dict[fx.Node, fx.Node]
Tensors = dict[str, torch.Tensor]


class Inputs(NamedTuple):
    """What a model is called with: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class CallSignature(NamedTuple):
    """How a model is called in one mode.

    Attributes:
        nested: How its inputs are nested.
        check: Raises AssertionError for inputs that the graph is not for.
        returned: How its output is nested.
        is_tensor: For each part of its output, whether it is a tensor.
        others: The parts that are no tensors; None in the place of each tensor, and of what is no plain value.
    """

    nested: Any
    check: Callable[..., Any]
    returned: Any
    is_tensor: list[bool]
    others: list[Any]

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the inputs as the graph takes them.

        Raises:
            ArgumentError: They are not like the example.
        """
        names = self.nested.child(1).context
        in_order = {name: kwargs[name] for name in names} if kwargs.keys() == set(names) else dict(kwargs)
        values, nested = pytree.tree_flatten((tuple(args), in_order))
        if nested != self.nested:
            raise ArgumentError(
                f"the model is called with {len(args)} positional arguments and the keywords {sorted(kwargs)}, but `example` "
                f"has {self.nested.child(0).num_children} and {sorted(names)}. Give an example with the arguments of the "
                "batches."
            )
        try:
            self.check(*values)
        except AssertionError as error:
            what = str(error).removeprefix("Guard failed: ")
            raise ArgumentError(
                f"the inputs are not like `example`, with which torch.export has recorded the model, and which has made it "
                f"depend on this: {what}. Give another example, or write the model as an nn.Sequential."
            ) from error
        return values

    def output(self, tensors: Sequence[Any]) -> Any:
        """Return what the model returns."""
        own = iter(tensors)
        leaves = [
            next(own) if is_tensor else other for is_tensor, other in zip(self.is_tensor, self.others, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.returned)


class StageGraph(NamedTuple):
    """The operations of a stage in one mode.

    Attributes:
        run: Takes the values that come from the stage before, and then the state; returns what the stage after needs.
        given: How many values come from the stage before.
        state: The names of the parameters, buffers and constants.
        written: The names of those that it changes, be it by a view from another stage.
    """

    run: fx.GraphModule
    given: int
    state: list[str]
    written: set[str]


class Recording(NamedTuple):
    """A model in one mode.

    Attributes:
        call: How it is called.
        parts: The operations of each stage.
        constants: The tensors in them that are neither parameters nor buffers, by name.
    """

    call: CallSignature
    parts: list[StageGraph]
    constants: Tensors


class TracedStage(nn.Module):
    """A stage of a recorded model, with the parameters and buffers that it uses, under their names in the model.

    The first stage is called as the model is; the others with what the stage before returns, a tuple of tensors and numbers.
    The last stage returns what the model returns.

    Args:
        number: The number of the stage.
        recordings: The model in both modes; at None as it was, if some of its modules were in one mode and some in the other.
        state: The parameters and buffers of this stage by name.
        saved: The names of those that are in the model's `state_dict`.
        mode: The mode in which the model was.
    """

    def __init__(
        self,
        number: int,
        recordings: Mapping[bool | None, Recording],
        state: Tensors,
        saved: Collection[str],
        mode: bool | None,
    ) -> None:
        super().__init__()
        parts = {key: recording.parts[number] for key, recording in recordings.items()}
        self._parts, self._calls = parts, {key: recording.call for key, recording in recordings.items()}
        self._is_first, self._is_last = number == 0, number == len(recordings[True].parts) - 1
        self._constants = {
            key: {name: tensor for name, tensor in recording.constants.items() if name in parts[key].state}
            for key, recording in recordings.items()
        }
        for name, tensor in state.items():
            self._enter(name, tensor, name in saved)
        self._set(mode)

    def _enter(self, name: str, tensor: torch.Tensor, persistent: bool) -> None:
        owner: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=persistent)

    def _set(self, mode: bool | None) -> None:
        self._mode = mode
        super().train(bool(mode))

    def train(self, mode: bool = True) -> TracedStage:
        """Use what was recorded in this mode."""
        self._set(mode)
        return self

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        part: StageGraph = self._parts[self._mode]
        call = self._calls[self._mode]
        values = call.flat(given, kwargs) if self._is_first else given
        if len(values) != part.given:
            raise ArgumentError(
                f"a stage got {len(values)} values from the stage before; expected {part.given}. Call `train` and `eval` on "
                "all ranks of the pipeline."
            )
        output = part.run(*values, *map(self._tensor, part.state))
        return call.output(output) if self._is_last else output

    def _tensor(self, name: str) -> torch.Tensor:
        constants = self._constants[self._mode]
        if name in constants:
            return constants[name]
        path, _, last = name.rpartition(".")
        found: torch.Tensor = getattr(self.get_submodule(path), last)
        return found


def trace(model: nn.Module, cuts: Sequence[str], example: Inputs) -> list[TracedStage]:
    """Return the stages of a model. They have its parameters and buffers themselves, no copies of them.

    Args:
        model: The model.
        cuts: The names of the layers with which the stages but the first begin.
        example: A micro-batch.

    Raises:
        ArgumentError: torch.export cannot follow the model, or would leave out something that the model does.
    """
    modes = {module: module.training for module in model.modules()}
    mode = model.training if len(set(modes.values())) == 1 else None
    recordings: dict[bool | None, Recording] = {}
    try:
        if mode is None:
            recordings[None] = _record(model, cuts, example)
        for each in (True, False):
            model.train(each)
            recordings[each] = _record(model, cuts, example)
    finally:
        for module, training in modes.items():
            module.training = training
    tensors: Tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    parts = [[recording.parts[number] for recording in recordings.values()] for number in range(len(cuts) + 1)]
    used = [{id(tensors[name]) for part in own for name in part.state if name in tensors} for own in parts]
    used[0] |= {id(tensor) for tensor in tensors.values()}.difference(
        *used
    )  # the unused are part of the model's state, too
    written = [{name for part in own for name in part.written} for own in parts]
    for name in sorted(set().union(*written) & tensors.keys()):
        places = [number for number, own in enumerate(used) if id(tensors[name]) in own or name in written[number]]
        if len(places) > 1:
            raise differing(name, places)
    saved = model.state_dict(keep_vars=True).keys()
    return [
        TracedStage(number, recordings, {n: each for n, each in tensors.items() if id(each) in own}, saved, mode)
        for number, own in enumerate(used)
    ]


def _record(model: nn.Module, cuts: Sequence[str], example: Inputs) -> Recording:
    """Record a model in the mode in which it is."""
    returned: list[Any] = []
    over: list[Callable[[Any], None]] = []

    def flat(module: nn.Module, args: Any, output: Any) -> tuple[torch.Tensor, ...]:
        over[-1](output)
        leaves, nested = pytree.tree_flatten(output)
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        # What is neither a tensor nor a plain value, such as a cache of keys and values, is left out: None.
        others = [leaf if isinstance(leaf, bool | int | float | str) else None for leaf in leaves]
        returned[:] = nested, is_tensor, others
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    example = _several_rows(example)
    hook = model.register_forward_hook(flat)
    try:
        with faithfully(model) as settle:
            over.append(settle)
            program = _export(model, example)
    finally:
        hook.remove()
    nested: Any = program.call_spec.in_spec
    check: Any = program.module()._guards_fn
    state = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT
    }
    splitter = _Splitter(program.graph_module, state, cuts)
    return Recording(CallSignature(nested, check, *returned), splitter.parts(), dict(program.constants))


def _several_rows(example: Inputs) -> Inputs:
    """Return an example of at least two samples: torch.export takes a dimension of one to be always one."""
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(example)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.dim() == 0 or tensor.shape[0] != 1 for tensor in tensors):
        return example
    return Inputs(*pytree.tree_map(lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x, tuple(example)))


def _export(model: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    """Record a model for inputs of any size, as far as it can take them."""
    sizes = torch.export.ShapesCollection()
    args, kwargs = example.args, dict(example.kwargs)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            sizes[leaf] = dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)
    return torch.export.export(model, args, kwargs, dynamic_shapes=sizes.dynamic_shapes(model, args, kwargs))


class _Splitter:
    """Splits the graph of a model.

    Args:
        module: The graph, with inputs for parameters, buffers and constants.
        state: The names of these in the model, by the names of the inputs.
        cuts: The names of the layers with which the stages but the first begin.
    """

    def __init__(self, module: fx.GraphModule, state: Mapping[str, str], cuts: Sequence[str]) -> None:
        self._module, self._cuts = module, cuts
        module.graph.eliminate_dead_code(lambda node: not _only_computes(node))
        self._state: dict[fx.Node, str] = {}
        """What belongs to the model: its state, and the graphs that operations run. Each stage has its own of them."""
        self._graphs: set[fx.Node] = set()
        self._nodes: list[fx.Node] = []
        for node in module.graph.nodes:
            if node.op == "placeholder" and node.name in state:
                self._state[node] = state[node.name]
            elif node.op == "get_attr":
                self._graphs.add(node)
            else:
                self._nodes.append(node)
        self._stages = dict(self._placed())
        self._last = {node: max((self._stages[user] for user in node.users), default=0) for node in self._nodes}

    def _placed(self) -> Iterator[tuple[fx.Node, int]]:
        """Return for each operation the stage to which it belongs. An item of a tuple belongs to the stage of the tuple."""
        begun = 0
        found: dict[Any, int] = {}
        for node in self._nodes:
            for number, cut in enumerate(self._cuts, 1):
                if number > begun and _is_in(node, cut):
                    if number != begun + 1:
                        raise ArgumentError(
                            f"the layer {cut!r} runs before {self._cuts[begun]!r}; expected `cuts` in the order in which the "
                            "layers run."
                        )
                    begun = number
            found[node] = found.get(node.args[0], begun) if node.target is operator.getitem else begun
            yield node, found[node] if node.op != "output" else len(self._cuts)
        if begun < len(self._cuts):
            raise ArgumentError(
                f"the layer {self._cuts[begun]!r} does not compute anything, so no stage can begin with it. Cut elsewhere."
            )

    def parts(self) -> list[StageGraph]:
        """Return the parts of all stages."""
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        ends = range(len(self._cuts) + 1)
        crossing = [inputs, *([n for n in self._nodes if self._stages[n] < end <= self._last[n]] for end in ends[1:])]
        (output,) = (node for node in self._nodes if node.op == "output")
        results: list[Sequence[Any]] = [*crossing[1:], output.args[0]]  # type: ignore[list-item]
        return [self._part(number, crossing[number], results[number]) for number in ends]

    def _part(self, number: int, given: Sequence[fx.Node], result: Sequence[Any]) -> StageGraph:
        graph, own = fx.Graph(), [node for node in self._nodes if self._stages[node] == number]
        own = [node for node in own if node.op == "call_function"]
        changed = {storage for node in own for storage in map(_storage, _written(node)) if storage is not None}
        new: Values = {node: graph.placeholder(node.name) for node in given}
        needed = [arg for node in own for arg in node.all_input_nodes] + [r for r in result if isinstance(r, fx.Node)]
        state = {node: graph.placeholder(node.name) for node in dict.fromkeys(needed) if node in self._state}
        graphs = {node: graph.get_attr(str(node.target)) for node in dict.fromkeys(needed) if node in self._graphs}
        if number:
            self._separate(graph, given, new, changed)
        new |= state | graphs
        for node in own:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[value] if isinstance(value, fx.Node) else value for value in result))
        root = {str(node.target): getattr(self._module, str(node.target)) for node in graphs}
        names = [self._state[node] for node in state]
        written = {name for node, name in self._state.items() if _storage(node) in changed}
        return StageGraph(fx.GraphModule(root, graph), len(given), names, written)

    @staticmethod
    def _separate(graph: fx.Graph, given: Sequence[fx.Node], new: Values, changed: set[int]) -> None:
        """Copy the values from another rank that a stage changes: the gradient goes back to what has arrived."""
        for node in given:
            if _storage(node) in changed:
                shared = [other.name for other in given if _storage(other) == _storage(node)]
                if len(shared) > 1:
                    raise ArgumentError(
                        f"a stage changes in place what it gets from the stage before ({', '.join(shared)} are views of the "
                        "same memory), and the others would not see it. Use operations that are not in place, or cut elsewhere."
                    )
                new[node] = graph.call_function(torch.ops.aten.clone.default, (new[node],))


def _is_in(node: fx.Node, layer: str) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    return any(path == layer or path.startswith(f"{layer}.") for path, _ in stack.values())


def _only_computes(node: fx.Node) -> bool:
    """Return whether an operation does nothing but compute its result, so that it can go if nobody needs that."""
    if node.target is operator.getitem or node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False  # an operation that runs a graph may change buffers there
    return not (
        _written(node) or node.target.tags.count(torch.Tag.nondeterministic_seeded) or not node.target._schema.returns
    )


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an operation changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if node.target is torch.ops.aten.batch_norm.default:
        named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        found = [named["running_mean"], named["running_var"]] if named["training"] else []
    else:
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [
            (argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs
        ]
        found = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [value for value in pytree.tree_leaves(found) if isinstance(value, fx.Node)]


def _storage(node: fx.Node) -> int | None:
    """Return what views of the same memory have in common; None for what is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
