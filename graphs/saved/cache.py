"""A session's compilation, read from a file or written to one.

first process:  the model is called, Dynamo traces it -> Keeper -> Plan, pieces -> file
second process: file -> Plan, pieces -> LoadedModel, called in the compiled model's place
"""

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

from fx_passes.kept import CompiledGraph, Keeper
from fx_passes.observe import PassRecord, Recorder
from graphs.options import SessionOptions
from graphs.runner import StepRunner
from graphs.saved.described import changed_module, digest_of, name_of, traced_modules
from graphs.saved.folder import Entry, Folder, NotSavedError
from graphs.saved.key import key_of
from graphs.saved.loaded import LoadedModel
from graphs.saved.plan import Plan


class CompileCache:
    """The folder of compiled models, for one session. Called once in the compiled model's place.

    The first call loads the model, or compiles and saves it. What cannot be read or written is
    compiled as without a folder, with the reason in `outcome`.

    Args:
        path: of the folder.
        compiled: the compiled model.
        record: what the passes did; it is saved too.
        batch: what passes may read of the batch's metadata; see `batch_text`.

    Attributes:
        outcome: what came of it, in a line for reports.
        model: what is to be called from then on; None before the first call.
    """

    def __init__(
        self, path: str | os.PathLike[str], compiled: Any, record: Recorder, batch: str
    ) -> None:
        self._folder, self._compiled = Folder(path), compiled
        self._original = getattr(compiled, "_orig_mod", compiled)
        self._record, self._batch = record, batch
        self._key: dict[str, str] = {}
        self.outcome = "not used yet"
        self.model: Callable[..., Any] | None = None

    def __call__(self, **inputs: Any) -> Any:
        if self.model is not None:
            return self.model(**inputs)
        loaded = self._load(inputs)
        if loaded is not None:
            try:
                output = loaded(**inputs)
            except Exception as error:  # compiled as without a file, which may raise it again
                self.outcome = f"compiled: what was loaded failed: {error!r}"
            else:
                self.model = loaded
                return output
        keeper = Keeper()
        self._record.keeper = keeper
        try:
            output = self._compiled(**inputs)
        finally:
            self._record.keeper = None
        self._save(keeper, inputs, output.logits)
        self.model = self._compiled
        return output

    def _load(self, inputs: Mapping[str, Any]) -> LoadedModel | None:
        """The model from its file; None: it must be compiled, and `outcome` says why."""
        try:
            self._key = key_of(self._original, self._compiled, inputs, self._batch)
            entry = self._folder.read(self._name)
            if entry is None:
                raise NotSavedError(self._why_missing())
            loaded = self._restore(entry, inputs)
            self._record.passes += [PassRecord(**fields) for fields in entry.header["passes"]]
        except NotSavedError as error:
            self.outcome = f"compiled: {error}"
            return None
        self.outcome = f"loaded from {self._folder.path}"
        return loaded

    def _save(self, keeper: Keeper, inputs: Mapping[str, Any], logits: torch.Tensor) -> None:
        """Write what was compiled, if what is read back gives the same `logits` of `inputs`."""
        if not self._key:
            return  # `outcome` says why
        try:
            entry = self._entry(keeper)
            again = self._restore(entry, inputs)(**inputs).logits
            if not torch.equal(again.nan_to_num(), logits.nan_to_num()):
                raise NotSavedError("what was read back computes other logits")
            self._folder.write(self._name, entry)
        except NotSavedError as error:
            self.outcome += f"; not saved: {error}"
        except Exception as error:  # of parts of torch that are not public
            self.outcome += f"; not saved: {type(error).__name__}: {error}"
        else:
            self.outcome += f"; saved in {self._folder.path}"

    @property
    def _name(self) -> str:
        return digest_of("\n".join(f"{k} {v}" for k, v in self._key.items()))

    def _why_missing(self) -> str:
        """What differs from the entry that is most alike."""
        differing = [
            [name for name in self._key if header.get("key", {}).get(name) != self._key[name]]
            for header in self._folder.headers()
        ]
        if not differing:
            return f"nothing is saved in {self._folder.path}"
        nearest = min(differing, key=len)
        return f"nothing is saved for this; other than what is: {', '.join(nearest)}"

    def _entry(self, keeper: Keeper) -> Entry:
        if len(keeper.graphs) != 1:
            raise NotSavedError(f"Dynamo made {len(keeper.graphs)} graphs, not one")
        (graph,) = keeper.graphs
        header = {
            "key": self._key,
            "plan": vars(Plan.of(graph)),
            "modules": traced_modules(graph.traced_code),
            "passes": [_fields(record) for record in self._record.passes],
        }
        return Entry(header, _pickles(graph))

    def _restore(self, entry: Entry, inputs: Mapping[str, Any]) -> LoadedModel:
        header = entry.header
        if header.get("key") != self._key:
            raise NotSavedError("the file is of another compilation")
        if (name := changed_module(header["modules"])) is not None:
            raise NotSavedError(f"the code of {name} has changed")
        try:
            pieces = [_piece(content) for content in entry.pieces]
            plan = Plan(**header["plan"])
            return LoadedModel(plan, pieces, self._original, self._compiled, inputs)
        except NotSavedError:
            raise
        except Exception as error:  # of parts of torch that are not public
            message = f"the file cannot be used: {type(error).__name__}: {error}"
            raise NotSavedError(message) from error


def batch_text(runner: StepRunner, options: SessionOptions) -> str:
    """What passes may read of the batch's metadata: backend, geometries and sizes."""
    names = ("backend", "block_size", "kv_cache_dtype", "cache_layout", "max_batch_size",
             "max_tokens", "max_tokens_per_step", "decode_steps", "num_draft_tokens",
             "share_prefixes", "batch_invariant")  # fmt: skip
    sizes = [f"{name}={getattr(options, name)!r}" for name in names]
    captures = f"captures={runner.graphs is not None}"  # then passes for replays may be on
    return "\n".join([name_of(type(runner.builder)), repr(runner.cache.specs), *sizes, captures])


def _fields(record: PassRecord) -> dict[str, Any]:
    """The fields that reports show, without texts and pictures."""
    names = ("pass_name", "stage", "graph_name", "matches", "skipped", "num_calls", "reasons",
             "looks_for", "summary")  # fmt: skip
    return {name: getattr(record, name) for name in names}


def _pickles(graph: CompiledGraph) -> list[bytes]:
    with functorch_config.patch(bundled_autograd_cache=True):
        found = []
        for piece in graph.pieces:
            if (serialize := getattr(piece, "serialize", None)) is None:
                raise NotSavedError("Inductor has no form of a piece that can be written")
            found.append(pickle.dumps(serialize()))
        return found


def _piece(content: bytes) -> Callable[..., Any]:
    """Unpickle a piece, of a file that `Folder` trusts."""
    with functorch_config.patch(bundled_autograd_cache=True):
        return deserialize_bundled_cache_entry(pickle.loads(content))
