"""What makes the KV pages of two SGLang engines interchangeable, beyond the pool's geometry.

SGLang's page keys are hashes of tokens, cache salt and adapter id; they say nothing of the model.
This module names the rest. It judges weights by their files, so that a model that was trained on
in place is another one, and gives an engine a namespace of its own where files cannot vouch for
what it has loaded: stale pages are worse than lost ones.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_COPIED = {
    "revision": "the model's revision on its hub",
    "load_format": "how the files were read",
    "dtype": "what activations, and so KV, are computed in",
    "kv_cache_dtype": "what KV is stored in",
    "quantization": "what the weights were quantized to on the way",
    "modelopt_quant": "likewise",
    "rl_quant_profile": "likewise",
    "model_impl": "which implementation of the model runs",
    "model_config_parser": "how the model's configuration was read",
    "json_model_override_args": "what was changed in it",
    "context_length": "the longest sequence, which some rotary embeddings depend on",
    "tp_size": "how many ranks hold the heads",
    "attn_dp_size": "how many groups of them there are",
    "enable_deterministic_inference": "kernels that must not mix their results with others'",
    "rl_on_policy_target": "likewise",
    "speculative_algorithm": "what a draft model's KV is computed for",
    "speculative_draft_model_revision": "its revision on its hub",
    "speculative_draft_model_quantization": "what its weights were quantized to on the way",
    "speculative_draft_load_format": "how its files were read",
}
_JUDGED = (
    "model_path",
    "download_dir",
    "quantization_param_path",
    "random_seed",
    "speculative_draft_model_path",
    "lora_paths",
    "weight_cache_mode",
    "custom_weight_loader",
    "checkpoint_engine_wait_weights_before_ready",
)
ARGUMENTS = (*_COPIED, *_JUDGED)
"""The fields of SGLang's `ServerArgs` that are looked at."""

_WITHOUT_FILES = {"remote", "remote_instance", "rdma", "private", "ipc_cache"}
"""Load formats (SGLang 0.5.23, `LoadFormat`) whose weights come from elsewhere."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".msgpack"}
_CODE_SUFFIXES = {".json", ".py", ".yaml", ".yml"}
_MAX_FILES = 4096


def namespace(
    server_args: Any, *, formats: Mapping[str, str], instance: str, started_s: float
) -> dict[str, str]:
    """Everything that two engines must have in common to share pages.

    Fields: those of `_COPIED` that were set; `engine`; `pool NAME` for each pool (what its bytes
    mean); `model` (path or hub id); `files` (names, sizes and modification times of the model's
    files); `draft` (a draft model's path and files); `seed` (dummy weights); `scales` (the file of
    KV scales); `adapters` (names, paths and files of the adapters given at start: their ids are
    derived from name and path, not from what the files hold; an adapter loaded later gets a random
    id, which no other engine can hit); and `private` (this engine's instance, and why nobody may
    share with it).

    Args:
        server_args: SGLang's `ServerArgs`, or None where there is no server.
        formats: For each pool, what the bytes of its pages mean.
        instance: The engine's id.
        started_s: When this process began, in seconds since the epoch: files that have changed
            since may not be those that it has loaded.
    """
    fields = {"engine": "sglang"}
    for pool, text in formats.items():
        fields[f"pool {pool}"] = _short(text)
    for name in _COPIED:
        value = getattr(server_args, name, None)
        if value not in (None, "", False):
            fields[name] = _short(str(value))
    doubts: list[str] = []

    def stamp(what: str, path: Path) -> str:
        try:
            files = sorted(_files(path))
        except OSError as error:
            doubts.append(f"{what} cannot be read: {error}")
            return ""
        if not files:
            doubts.append(f"{what} has no files at {path}")
        if any(changed_ns > started_s * 1e9 for _, _, changed_ns in files):
            doubts.append(f"files of {what} have changed since the engine was started")
        return _digest(files)

    model = getattr(server_args, "model_path", None)
    if model is None:
        doubts.append("no model path")
    else:
        path = _local(str(model), fields.get("revision"), getattr(server_args, "download_dir", ""))
        fields["model"] = _short(str(path or model))
        if path is None:
            doubts.append(f"no files of {model} on this machine")
        else:
            fields["files"] = stamp("the model", path)
    if draft := getattr(server_args, "speculative_draft_model_path", None):
        path = _local(
            str(draft),
            fields.get("speculative_draft_model_revision"),
            getattr(server_args, "download_dir", ""),
        )
        if path is None:
            doubts.append(f"no files of the draft model {draft} on this machine")
        else:
            fields["draft"] = _short(f"{path} {stamp('the draft model', path)}")
    if fields.get("load_format") == "dummy":
        fields["seed"] = str(getattr(server_args, "random_seed", None))
    if scales := getattr(server_args, "quantization_param_path", None):
        fields["scales"] = stamp("--quantization-param-path", Path(str(scales)))
    if adapters := getattr(server_args, "lora_paths", None):
        records = []
        for name, source in _adapters(adapters):
            path = _local(source, None, "")
            if path is None:
                doubts.append(f"no files of adapter {name} on this machine")
            else:
                records.append((name, str(path), stamp(f"adapter {name}", path)))
        fields["adapters"] = _digest(sorted(records))
    if fields.get("load_format") in _WITHOUT_FILES:
        doubts.append(f"--load-format {fields['load_format']} takes weights from elsewhere")
    if getattr(server_args, "weight_cache_mode", None) not in (None, "off"):
        doubts.append("--weight-cache-mode takes weights from another process")
    if getattr(server_args, "custom_weight_loader", None):
        doubts.append("--custom-weight-loader takes weights from elsewhere")
    if getattr(server_args, "checkpoint_engine_wait_weights_before_ready", False):
        doubts.append("a checkpoint engine brings the weights")
    if doubts:
        fields["private"] = _short(f"{instance}: {'; '.join(doubts)}", keep=True)
    return fields


def process_start_s() -> float:
    """When this process began, in seconds since the epoch, to about a clock tick."""
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    """(relative name, bytes, modification time in ns) of each file that can bear on KV.

    Raises: OSError: a file or a directory that cannot be read, or far too many files.
    """

    def fail(error: OSError) -> None:
        raise error

    if path.is_file():
        names: Iterable[Path] = [path]
    else:
        names = (
            Path(folder, name)
            for folder, _, entries in os.walk(path, onerror=fail)
            for name in entries
            if Path(name).suffix in _WEIGHT_SUFFIXES | _CODE_SUFFIXES
        )
    for count, name in enumerate(names):
        if count == _MAX_FILES:
            raise OSError(f"more than {_MAX_FILES} files under {path}")
        status = name.stat()
        yield os.path.relpath(name, path), status.st_size, status.st_mtime_ns


def _local(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The model's file or directory: the path itself, or the hub's snapshot in the local cache."""
    path = Path(model)
    if path.exists():
        return path.resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir or None, local_files_only=True
            )
        ).resolve()
    except (OSError, ValueError):  # not in the cache; not a hub id
        return None


def _adapters(given: Any) -> Iterator[tuple[str, str]]:
    """(name, path) of each adapter in `ServerArgs.lora_paths`, in any form that it takes."""
    items = given.items() if isinstance(given, dict) else given
    for item in items:
        if isinstance(item, str):
            name, _, path = item.partition("=")
            yield name, path or name
        elif isinstance(item, tuple):
            name, path = item
            yield str(name), str(getattr(path, "lora_path", path))
        elif isinstance(item, dict):
            yield str(item["lora_name"]), str(item["lora_path"])
        else:
            yield str(item.lora_name), str(item.lora_path)


def _digest(records: object) -> str:
    return hashlib.sha256(repr(records).encode()).hexdigest()


def _short(text: str, *, keep: bool = False) -> str:
    """Bound a field's length. What is cut off still counts, unless the beginning is unique."""
    limit = 512
    if len(text) <= limit:
        return text
    return text[:limit] if keep else f"{text[: limit - 64]}{_digest(text)}"
