"""Records module calls: an opened module's inner calls one by one, any other as one ``call_module`` node.

The node calls the user's own object, so hooks, ``torch.compile``, checkpointing and custom autograd inside it keep working.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from fxchimera_passes._torch import call_uncompiled, in_transform, storage_key, version
from fxchimera_passes.capture.containers import Filled, note_filled
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.signals import NeedClose
from fxchimera_passes.capture.snapshots import unlike
from fxchimera_passes.capture.state import Attributes, changed_attributes, plain_state
from fxchimera_passes.capture.targets import rebind
from fxchimera_passes.capture.watch import Seen
from fxchimera_passes.capture.writes import order_reads, versions, written_since
from fxchimera_passes.captured import info
from fxchimera_passes.structure import flatten
from fxchimera_passes.whole import WHOLE

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["ModuleRule"]


class ModuleRule:
    """What a module call becomes in one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of ``module``, recorded if it comes from an opened module."""
        recorder = self.recorder
        name = recorder.writer.names.modules.get(id(module))
        if name is None:  # made during the forward: its calls belong to the module that made it
            return call_uncompiled(module, args, kwargs)
        recording = not recorder.paused and not in_transform()
        opened = recording and name in recorder.opened
        if recording:
            recorder.check_frame()
        caller, before = recorder.frames.innermost.name, recorder.watch.mark()
        with recorder.frames.enter(module, name, opened=opened):
            if not recording:
                result = call_uncompiled(module, args, kwargs)
            else:
                result = self._open(module, name, args, kwargs) if opened else self._whole(module, name, args, kwargs)
        recorder.profile.note(name, caller, *(now - then for now, then in zip(recorder.watch.mark(), before, strict=True)))
        return result

    def _open(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.recorder.entered.add(name)
        names = self.recorder.writer.names
        attributes, slots = plain_state(module), names.slots([module])
        with self.recorder.seeded_frame(name):
            result = call_uncompiled(module, args, kwargs)
            self.recorder.check_frame()
        with self.recorder.pause():
            changed = changed_attributes(module, attributes)
            rebound = [slot for slot, tensor in names.slots([module]).items() if slots.get(slot) is not tensor]
            if name and (changed or rebound):
                what = f"forward sets attributes {', '.join((*changed, *rebound))}"
                raise NeedClose(module, what, user_line())
            if changed:
                self.recorder.attributes.note(module, name, changed)
                self.recorder.stateful[name] = changed
                self.recorder.notes.append(f"the model's forward sets {', '.join(changed)}, which a pipelined step does not do")
            self._write_back(module, rebound)
        return result

    def _write_back(self, module: nn.Module, rebound: list[str]) -> None:
        """``self.mean = new`` in the model's own forward: write the new value into the old buffer at the end."""
        recorder, writer = self.recorder, self.recorder.writer
        values = writer.names.slots([module])
        for slot in rebound:
            old = recorder.original_buffers.get(slot)
            if old is None:
                raise NeedClose(module, f"forward makes a new buffer {slot}", user_line(), fatal=True)
            why = unlike(old, values[slot])
            shared = [other for other in values if other not in rebound and values[other] is values[slot]]
            shared += [other for other, tensor in recorder.original_buffers.items() if tensor is old and other not in rebound]
            if why or shared:
                what = why or f"the tensor of {shared[0]}, or one for both,"
                raise NeedClose(module, f"forward puts {what} in the place of the buffer {slot}", user_line(), fatal=True)
        for slot in rebound:
            buffer, value = writer.attribute(slot, recorder.original_buffers[slot]), values[slot]
            node = writer.graph.call_function(rebind, (buffer, writer.node_of(value)))
            writer.add(node, value=value, depends=writer.depends(node.args), writes=(slot,))

    def _whole(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, writer = self.recorder, self.recorder.writer
        recorder.check_hooks()
        with recorder.pause():
            arguments = [writer.convert(value) for value in args], {key: writer.convert(v) for key, v in kwargs.items()}
            before, filled = versions(args, kwargs), Filled(args, kwargs)
            states = {id(m): plain_state(m) for m in module.modules()}
            slots = writer.names.slots(module.modules())
            counts = {id(tensor): version(tensor) for tensor in slots.values()}
            with recorder.watch.node(module, self._reachable(module, args, kwargs)) as seen, recorder.host.aside() as moved:
                result = recorder.run(module, args, kwargs)
                recorder.watch.check(flatten((result, args, kwargs))[0])
                if moved():
                    seen.random.insert(0, recorder.frames.host_key())
            recorder.refuse_smuggled(f"{type(module).__name__} ({name})", seen)
            self._note_state(module, states)
            left = (result, args, kwargs) if filled.collect() else result
            seen.read.update(storage_key(tensor) for tensor in flatten(left)[0])
            given, changed = filled.rebuild(writer, arguments), written_since(before, seen)
            parameters, buffers = self._reads(module, seen, (args, kwargs))
            node = writer.add(
                writer.graph.call_module(name or WHOLE, tuple(arguments[0]), arguments[1]),
                value=result,
                depends=self._depends(arguments, seen, parameters, buffers),
                seen=seen,
                parameters=parameters,
                buffers=buffers,
                writes=self._writes(module, seen, slots, counts),
                changed=changed,
            )
            if module in recorder.effectful:
                writer.keep_alive.add(node)
            order_reads(writer, node, changed, result)
            writer.bind_result(node, result)
            note_filled(writer, node, filled, given)
        return result

    def _depends(self, arguments: Any, seen: Seen, parameters: tuple[str, ...], buffers: tuple[str, ...]) -> set[str]:
        """Return what the call's value hangs on: not an argument whose memory nobody read, which only told a shape or dtype."""
        storage = self.recorder.writer.storage
        found = {kind for kind, names in (("parameter", parameters), ("buffer", buffers)) if names}

        def add(node: fx.Node) -> None:
            if seen.blind or storage.get(node) is None or storage[node] in seen.read:
                found.update(info(node).depends)

        fx.map_arg(arguments, add)
        return found

    def _reads(self, module: nn.Module, seen: Seen, arguments: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the parameters and buffers of the subtree, and others that the call read without being given them."""
        names = self.recorder.writer.names
        parameters, buffers = names.inside(module)
        passed = {names.tensor(tensor) for tensor in flatten(arguments)[0]}
        for identity in seen.named:
            for table, found in ((names.parameters, parameters), (names.buffers, buffers)):
                name = table.get(identity)
                if name is None or name in found or name in passed:
                    continue
                if table is names.parameters:
                    parameters = (*parameters, name)
                else:
                    buffers = (*buffers, name)
        return parameters, buffers

    def _reachable(self, module: nn.Module, args: Any, kwargs: Any) -> set[int | None]:
        tensors = [*flatten((args, kwargs))[0], *module.parameters(), *module.buffers()]
        return {storage_key(tensor) for tensor in tensors}

    def _note_state(self, module: nn.Module, states: Mapping[int, Attributes]) -> None:
        recorder = self.recorder
        for inner in module.modules():
            changed = changed_attributes(inner, states[id(inner)]) if id(inner) in states else ()
            if changed:
                name = recorder.writer.names.modules.get(id(inner))
                if name is not None:
                    recorder.attributes.note(inner, name, changed)
                recorder.stateful[name or ""] = changed
                recorder.effectful.add(module)

    def _writes(self, module: nn.Module, seen: Seen, slots: Mapping[str, Tensor], counts: Mapping[int, int]) -> tuple[str, ...]:
        writer, names = self.recorder.writer, self.recorder.writer.names
        written = {names.buffer_storages[key] for key in seen.written if key in names.buffer_storages}
        for slot, tensor in names.slots(module.modules()).items():
            old = slots.get(slot)
            canonical = names.buffers.get(id(old), slot) if old is not None else slot
            if old is not tensor:
                names.add_buffer(canonical, tensor)
                writer.forget_attribute(canonical)
                written.add(canonical)
            elif version(tensor) != counts[id(tensor)]:
                written.add(canonical)
        return tuple(sorted(written))
