"""NxDModel (trace/nxd_model/nxd_model.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.neuron.closed import runtime, tracing
from tests.neuron.closed.protos import MetaTensor
from tests.neuron.nxd.recorded import recorded


@recorded("trace.nxd_model.nxd_model:NxDModel")
class NxDModel:
    def __init__(
        self,
        world_size: int,
        start_rank: int | None = None,
        local_ranks_size: int | None = None,
        state_initializer: Any = None,
        layout_transformer: Any = None,
    ) -> None:
        assert (start_rank is None) == (local_ranks_size is None)
        self._ranks = world_size
        self._layout = None
        if layout_transformer is not None:
            self._layout = runtime.LayoutTransformation(
                Path(layout_transformer.neff_filepath).read_bytes(),
                Path(layout_transformer.metaneff_filepath).read_bytes(),
                world_size,
            )
        self._shapes: dict[str, tuple[list[int], torch.dtype]] = {}
        self._models: dict[str, Any] = {}
        self._parts: dict[str, tuple[Any, Any]] = {}
        self._routes: dict[str, list[str]] = {}
        self._params: list[Any] = []
        self._weights: list[Any] = [{} for _ in range(world_size)]
        self._loaded = False

    def add(self, key: str, trace_artifacts: Any, compilation_artifacts: Any) -> NxDModel:
        made = trace_artifacts
        assert isinstance(made.flattener.layout, tuple), "this trace was added before"
        made.flattener.layout = list(made.flattener.layout)
        assert not self._params or self._params == made.model_params, "another signature"
        self._params = made.model_params
        if not self._shapes:
            self._shapes = {
                t.checkpoint_key.decode(): (list(t.shape), tracing.get_torch_dtype(t.data_type))
                for t in made.metaneff.input_tensors
                if t.type == MetaTensor.INPUT_STATE
            }
        neff = Path(compilation_artifacts.neff_filepath).read_bytes()
        self._models[key] = runtime.SPMDModel(
            neff, made.metaneff.SerializeToString(), self._ranks, self._ranks
        )
        self._parts[key] = (made.flattener, made.packer)
        route = [(a.param_name, list(a.tensor.shape)) for a in made.provided_args]
        self._routes.setdefault(str(route), []).append(key)
        return self

    def set_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        if self._loaded:
            raise ValueError("set_weights() after loading")
        load = runtime.parallel_load if self._layout is None else None
        self._weights = (
            load(sharded_checkpoint)
            if load is not None
            else self._layout.forward(sharded_checkpoint, False)  # type: ignore[union-attr]
        )

    def to_neuron(self) -> None:
        if self._loaded:
            return
        states = [
            {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self._shapes.items()}
            for _ in range(self._ranks)
        ]
        for model in self._models.values():
            model.initialize(states, self._weights, 0)
        self._loaded = True

    def forward(
        self,
        *args: Any,
        model_name: str | None = None,
        forward_mode: str = "default",
        **kwargs: torch.Tensor,
    ) -> Any:
        if not self._loaded:
            raise RuntimeError("Model not initialized. Call set_weights() and to_neuron()")
        assert not args and forward_mode == "default", "not used here"
        known = [p.param_name for p in self._params]
        assert set(kwargs) <= set(known), "Not all kwargs were parsed"
        inputs = [kwargs[name] for name in known if name in kwargs]
        route = [(name, list(kwargs[name].shape)) for name in known if name in kwargs]
        keys = self._routes[str(route)]
        assert len(keys) > 1 or model_name in (None, keys[0]), f"the route is {keys[0]}"
        flattener, packer = self._parts[model_name or keys[0]]
        return packer(self._models[model_name or keys[0]].forward(flattener(inputs)))


for _name in ("add", "set_weights", "to_neuron", "forward"):
    _path = f"trace.nxd_model.nxd_model:NxDModel.{_name}"
    setattr(NxDModel, _name, recorded(_path)(getattr(NxDModel, _name)))
