"""vLLM's own argument parser in a process of its own, without torch: command lines in, what they mean out.

Run by the Python of `e2e/vllm_source.py`'s environment, with the unpacked source as its argument. It prints one line
when it is ready. Then each line of standard input is a JSON object with the `words` after `vllm serve` and the
`environment`, answered by one line: `values`, every option as vLLM's code gets it, and `configured`, the configurations
that it makes of them; or vLLM's refusal, `error`, and the exit `status`. The line `null` asks for all options.

The parser makes its options from vLLM's configuration classes, and those live in modules that import torch and many
more packages. Nothing of them is used until a model is looked at, so a module whose every attribute is an inert class
stands in for each. Real are vLLM's code up to the model, pydantic, and the small packages of the lock.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STOOD_IN_FOR = frozenset(
    "torch transformers huggingface_hub safetensors numpy cbor2 urllib3 aiohttp requests openai openai_harmony PIL "
    "pybase64 uvloop cpuinfo fastapi prometheus_client partial_json_parser xgrammar llguidance zmq psutil cloudpickle "
    "cachetools uvicorn "
    # Of vLLM itself: what changes torch, and the servers.
    "vllm.env_override vllm.entrypoints.launchers.api_server vllm.entrypoints.launchers.launcher".split()
)
"""What vLLM's modules import on the way to the parser and its checks, which have no use for it. Every other package
that is not installed is missing, as optional ones are in vLLM's own image."""


class _Inert(type):
    """The class of stand-ins: to be inherited from, called, subscripted, iterated, and named in annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = inert(name)
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object, or, for what looks like the use of a decorator, what was decorated."""
        decorated = _decorated(args, kwargs)
        return type.__call__(cls) if decorated is None else decorated

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return typing.Union[cls, other]  # noqa: UP007  # `|` would come back to here

    def __ror__(cls, other: Any) -> Any:
        return typing.Union[other, cls]  # noqa: UP007  # as above


class _Nothing:
    """What objects of stand-ins do: nothing, without complaint."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __init_subclass__(cls, **_kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = _decorated(args, kwargs)
        return self if decorated is None else decorated

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        return importlib.import_module("pydantic_core.core_schema").any_schema()


def inert(name: str) -> Any:
    """A class of that name with which anything may be done, and nothing happens."""
    return _Inert(name, (_Nothing,), {})


def _decorated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    alone = len(args) == 1 and not kwargs
    return args[0] if alone and isinstance(args[0], type | types.FunctionType) else None


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = "99.0.0" if name == "__version__" else inert(name)
        setattr(self, name, value)
        return value


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        words = fullname.split(".")
        known = any(".".join(words[: end + 1]) in STOOD_IN_FOR for end in range(len(words)))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _operator_schema(function: Any, **_how: Any) -> str:
    """In torch's place: vLLM counts the tensors that an operator of its own returns."""
    tensors = str(inspect.signature(function).return_annotation).count("Tensor")
    return f"() -> ({', '.join(['Tensor'] * tensors)})"


CONFIGURED = (
    "attention_config",
    "cache_config",
    "kv_events_config",
    "kv_transfer_config",
    "parallel_config",
    "scheduler_config",
)
"""Configurations of which the answer tells."""
MODEL: dict[str, Any] = {
    **dict.fromkeys(("hf_config", "quantization", "dtype"), None),
    **dict.fromkeys(("is_attention_free", "is_multimodal_model", "is_mm_prefix_lm", "is_encoder_decoder"), False),
    **dict.fromkeys(("is_hybrid", "is_quantized", "skip_tokenizer_init"), False),
    **dict.fromkeys(("is_moe", "is_chunked_prefill_supported", "is_prefix_caching_supported"), True),
    "runner_type": "generate",
    "model_weights": "",
    "hf_text_config": None,
    "get_sliding_window": lambda: None,
}
"""What vLLM would have found out about the model: one that allows everything."""


class RealParser:
    """`vllm serve` up to where it would look at the model, on a machine that seems to have H200s."""

    def __init__(self, source: Path) -> None:
        sys.path.insert(0, str(source))
        sys.meta_path.insert(0, _StandIns())
        importlib.import_module("torch.library").__dict__["infer_schema"] = _operator_schema
        importlib.import_module("huggingface_hub").__dict__["constants"] = types.SimpleNamespace(HF_HUB_OFFLINE=False)
        importlib.import_module("vllm.platforms").__dict__["_current_platform"] = _platform()
        serve = importlib.import_module("vllm.entrypoints.cli.serve")
        for start in ("run_headless", "run_multi_api_server", "run_dp_supervisor"):
            serve.__dict__[start] = lambda _args: None
        self._command = serve.ServeSubcommand()
        self._arguments: Any = importlib.import_module("vllm.engine.arg_utils")
        self._environment: Any = importlib.import_module("vllm.envs")
        self._usage = importlib.import_module("vllm.usage.usage_lib").UsageContext
        self._parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
        self._serve = self._command.subparser_init(self._parser.add_subparsers(dest="subparser"))
        # The whole configuration looks at the model; of it only what is about KV transfer is run.
        self._whole = self._arguments.VllmConfig
        self._arguments.__dict__["VllmConfig"] = types.SimpleNamespace
        self._arguments.__dict__["maybe_override_with_speculators"] = _no_speculators

    def read(self, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """What vLLM makes of the words, or how it refuses them: 2 the parser, 1 what is checked after it."""
        said = io.StringIO()
        values = None
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            with contextlib.redirect_stderr(said):
                parsed = self._parser.parse_args(["serve", *words])
            values = plain(vars(parsed))
            parsed = copy.deepcopy(parsed)  # defaults are objects that every parse shares, and vLLM changes them
            self._command.validate(parsed)
            self._command.cmd(parsed)
            configured = self._configure(self._arguments.AsyncEngineArgs.from_cli_args(parsed), parsed.headless)
        except SystemExit as error:
            usage, _, reason = said.getvalue().rpartition("error: ")
            return {"status": error.code, "error": reason.strip() or usage}
        except Exception as error:  # noqa: BLE001  # whatever vLLM's process would end with
            return {"status": 1, "error": f"{type(error).__name__}: {error}", "values": values}
        finally:
            os.environ.clear()
            os.environ.update(before)
        return {"values": values, "configured": configured}

    def _configure(self, engine: Any, headless: bool) -> dict[str, Any]:
        """All configurations but the model's, as vLLM makes them, and its checks of KV transfer."""
        length = engine.max_model_len
        if length in (None, -1):  # the model's own: never the reason of a refusal
            length = min(131_072, engine.max_num_batched_tokens or 131_072)
        model = types.SimpleNamespace(**MODEL, model=engine.model, tokenizer=engine.model, max_model_len=length)
        model.enable_sleep_mode = False  # with it vLLM asks the connector's class, which needs kernels
        model.enable_cumem_allocator = engine.enable_cumem_allocator or engine.enable_sleep_mode
        engine.create_model_config = lambda: model
        engine.create_speculative_config = lambda **_: None  # it looks at the draft model
        whole = engine.create_engine_config(self._usage.OPENAI_API_SERVER, headless=headless)
        self._whole._post_init_kv_transfer_config(whole)
        self._whole._verify_kv_transfer_compat(whole)
        _ = self._environment.VLLM_PORT  # looked at, and checked, when the engine's sockets are made
        return {name: plain(getattr(whole, name)) for name in CONFIGURED}

    def options(self) -> dict[str, Any]:
        """Every option: all its forms, also those that the help does not show, and what it is without them."""
        found: dict[str, Any] = {}
        for action in self._serve._actions:
            flags = [flag for flag, taken_by in self._serve._option_string_actions.items() if taken_by is action]
            found[action.dest] = {"flags": flags, "default": plain(action.default)}
        return {dest: option for dest, option in found.items() if dest != "help"}


def _no_speculators(model: str, tokenizer: Any, vllm_speculative_config: Any, **_: Any) -> tuple[str, Any, Any]:
    return model, tokenizer, vllm_speculative_config


def _platform() -> Any:
    """A machine with more H200s than any instance needs: how many there are is never the reason of a refusal."""
    interface = importlib.import_module("vllm.platforms.interface")
    found: dict[str, Any] = {
        "_enum": interface.PlatformEnum.CUDA,
        "device_name": "cuda",
        "device_type": "cuda",
        "dispatch_key": "CUDA",
        "device_count": classmethod(lambda _: 1024),
        "get_device_name": classmethod(lambda _, _id=0: "NVIDIA H200"),
        "get_device_total_memory": classmethod(lambda _, _id=0: 141 << 30),
        "is_device_capability": classmethod(lambda _, capability, _id=0: capability in ((9, 0), 90)),
    }
    return type("H200", (interface.Platform,), found)()


def plain(value: Any) -> Any:
    """A parsed value as JSON; what has no JSON form is written as text."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def main() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to standard output
    parser = RealParser(Path(sys.argv[1]))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(parser.options() if asked is None else parser.read(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
