"""vLLM's own argument parser in a process of its own, without torch: command lines in, what they mean out.

Run by the Python of `e2e/vllm_source.py`'s environment, with the unpacked source as its argument. It prints one line
when it is ready. Then each line of standard input is a JSON list of the words after `vllm serve`, answered by one line:
`{"values": {...}}`, every option as vLLM's code gets it, or `{"status": 2, "error": "..."}`, vLLM's refusal. The line
`null` asks for the options that there are.

The parser makes its options from vLLM's configuration classes, and those live in modules that import torch and many
more packages. Nothing of them is used while options are parsed, so a module whose every attribute is an inert class
stands in for each. Real are vLLM's code, pydantic, and the small packages of the lock.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
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


GPUS = 1024
"""More than any instance needs: how many there are is never the reason of a refusal."""


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
        return typing.Union[other, cls]  # noqa: UP007


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


class RealParser:
    """`vllm serve` up to where it would start the engine, on a machine that seems to have CUDA."""

    def __init__(self, source: Path) -> None:
        sys.path.insert(0, str(source))
        sys.meta_path.insert(0, _StandIns())
        importlib.import_module("torch.library").__dict__["infer_schema"] = _operator_schema
        interface = importlib.import_module("vllm.platforms.interface")
        looks = {"_enum": interface.PlatformEnum.CUDA, "device_name": "cuda", "device_type": "cuda"}
        looks |= {"dispatch_key": "CUDA", "device_count": classmethod(lambda _cls: GPUS)}
        cuda = type("Cuda", (interface.Platform,), looks)
        importlib.import_module("vllm.platforms").__dict__["_current_platform"] = cuda()
        serve = importlib.import_module("vllm.entrypoints.cli.serve")
        for start in ("run_headless", "run_multi_api_server", "run_dp_supervisor"):
            serve.__dict__[start] = lambda _args: None
        self._command = serve.ServeSubcommand()
        self._engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self._config = importlib.import_module("vllm.config")
        self._parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
        self._serve = self._command.subparser_init(self._parser.add_subparsers(dest="subparser"))

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """What vLLM makes of the words, or how it refuses them: 2 the parser, 1 what is checked after it."""
        said = io.StringIO()
        values = None
        try:
            with contextlib.redirect_stderr(said):
                parsed = self._parser.parse_args(["serve", *words])
            values = plain(vars(parsed))
            self._command.validate(parsed)
            self._command.cmd(parsed)
            self._configure(self._engine_args.from_cli_args(parsed))
        except SystemExit as error:
            usage, _, reason = said.getvalue().rpartition("error: ")
            return {"status": error.code, "error": reason.strip() or usage}
        except Exception as error:  # noqa: BLE001  # whatever vLLM's process would end with
            return {"status": 1, "error": f"{type(error).__name__}: {error}", "values": values}
        return {"values": values}

    def _configure(self, engine: Any) -> None:
        """Makes the configurations that need no knowledge of the model, from the arguments of the same names."""
        self._build(self._config.CacheConfig, engine, cache_dtype=engine.kv_cache_dtype)
        self._build(self._config.AttentionConfig, engine, backend=engine.attention_backend)
        self._build(self._config.ParallelConfig, engine)
        assumed = {"max_model_len": 131_072, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}
        known = {name: value for name in assumed if (value := getattr(engine, name)) not in (None, -1)}
        chunked = engine.enable_chunked_prefill is not False
        policy = {"policy": engine.scheduling_policy, "is_encoder_decoder": False, "enable_chunked_prefill": chunked}
        self._build(self._config.SchedulerConfig, engine, **{**assumed, **known, **policy})

    @staticmethod
    def _build(config: Any, engine: Any, **given: Any) -> None:
        names = {field.name for field in dataclasses.fields(config) if field.init}
        same = {name: value for name in names if (value := getattr(engine, name, None)) is not None}
        config(**same | {name: value for name, value in given.items() if value is not None})

    def options(self) -> dict[str, Any]:
        """Every option: all its forms, also those that the help does not show, and what it is without them."""
        found: dict[str, Any] = {}
        for action in self._serve._actions:
            flags = [flag for flag, taken_by in self._serve._option_string_actions.items() if taken_by is action]
            found[action.dest] = {"flags": flags, "default": plain(action.default)}
        return {dest: option for dest, option in found.items() if dest != "help"}


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
        words = json.loads(line)
        print(json.dumps(parser.options() if words is None else parser.read(words)), file=answers, flush=True)


if __name__ == "__main__":
    main()
