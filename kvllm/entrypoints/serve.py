"""Serve a model through an OpenAI-compatible API.

Without MODEL, the small reasoning model that comes with the package is served.

    kvllm serve
    kvllm serve Qwen/Qwen3-0.6B
    kvllm serve path/to/Qwen3-0.6B --port 8080 --kv-cache-memory-bytes 2G
    kvllm serve path/to/Qwen3-0.6B --compression policy=pressure
    KVLLM_API_KEY=secret kvllm serve path/to/Qwen3-0.6B --host 0.0.0.0

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "words: d3,f9\\n#>d+f=k\\n", "max_tokens": 100, "temperature": 0}'
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.engine_flags import add_engine_flags, engine_args_from
from kvllm.entrypoints.settings import parse_json_list, parse_json_object, reader
from kvllm.entrypoints.sizes import parse_count
from kvllm.errors import ConfigError

if TYPE_CHECKING:
    from kvllm.serving.state import CorsOptions, ServerOptions

WITHOUT_EFFECT = (
    "disable-log-requests",
    "no-enable-log-requests",
    "disable-uvicorn-access-log",
    "disable-fastapi-docs",
    "enable-request-id-headers",
    "enable-prompt-tokens-details",
    "enable-server-load-tracking",
)
"""Switches of vLLM's server that ask for what this one does in any case: it logs no prompts, and no docs page loads
scripts of others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser)
    add_chat_flags(parser)
    _add_cors_flags(parser)
    _add_tls_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    engine_args = engine_args_from(args)
    _ = engine_args.sampling_defaults  # what is wrong is told before anything is imported
    args.revision = engine_args.commit
    from kvllm.serving.run import Address, serve

    if args.open and args.uds:
        raise ConfigError(f"--open has no page at --uds {args.uds}: a browser needs --host and --port")
    serve(*read_options(args), Address(args.host, args.port, args.uds, _tls(args), args.open))


def read_options(args: argparse.Namespace) -> tuple[EngineArgs, ServerOptions]:
    """The options of the engine and those of the server. Raises ConfigError."""
    from kvllm.serving.auth import load_keys
    from kvllm.serving.state import ServerOptions

    for flag in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not allowed: at least 1")
    if not args.shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout {args.shutdown_timeout} is not allowed: at least 0 seconds")
    chat = chat_options(args)
    keys = load_keys(args.api_key_file, args.api_key or ())
    engine_args = engine_args_from(args, tenants=keys.tenants)
    return engine_args, ServerOptions(
        served_model_names=tuple(args.served_model_name or [engine_args.served_name]),
        keys=keys,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        shutdown_timeout=args.shutdown_timeout,
        cors=_cors(args),
        root_path=_root_path(args.root_path),
        enable_force_include_usage=args.enable_force_include_usage,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        enable_tokenizer_info_endpoint=args.enable_tokenizer_info_endpoint,
        lora_modules=_lora_modules(args.lora_modules or ()),
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
        **chat,
    )


def chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those options of a server that `add_chat_flags` adds. Raises ConfigError."""
    from kvllm.serving.chat_template import check_template_kwargs, read_template
    from kvllm.serving.parser_choice import AUTO
    from kvllm.serving.reasoning import thought_tags
    from kvllm.serving.tool_parsers import tool_parser

    if args.tool_call_parser not in (None, AUTO):
        tool_parser(args.tool_call_parser)
    if args.reasoning_parser not in (None, AUTO):
        thought_tags(args.reasoning_parser)
    return {
        "chat_template": None if args.chat_template is None else read_template(args.chat_template),
        "chat_template_kwargs": check_template_kwargs(args.default_chat_template_kwargs),
        "enable_auto_tool_choice": args.enable_auto_tool_choice,
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
    }


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is every one (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 is any free one (default: 8000)")
    add("--uds", metavar="PATH", help="listen at a Unix socket instead")
    add("--open", action="store_true", help="open the page, a chat and a monitor, in a browser")
    add("--root-path", default="", metavar="PATH", help="path of the server behind a proxy, such as /llm")
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model that requests may use (default: MODEL)",
    )
    keys = "accepted keys; other users of the machine can read them in the list of processes: prefer --api-key-file"
    add("--api-key", nargs="+", metavar="KEY", help=f"{keys}, or the environment variable KVLLM_API_KEY")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="TOML file with a table [[keys]] for each key (docs/serving.md)",
    )
    text = "give the usage in every chunk of every stream"
    add("--enable-force-include-usage", action="store_true", help=text)
    text = 'log probabilities name tokens "token_id:7", unless a request says otherwise'
    add("--return-tokens-as-token-ids", action="store_true", help=text)
    text = "answer /tokenizer_info, which shows the chat template"
    add("--enable-tokenizer-info-endpoint", action="store_true", help=text)
    text = "adapters that requests may name as their model, with --enable-lora"
    add("--lora-modules", nargs="+", metavar="NAME=PATH|ID", help=text)
    text = "let clients load adapters from any directory of this machine or hub, and unload them (docs/serving.md)"
    add("--allow-runtime-lora-updating", action="store_true", help=text)
    text = "most completions in flight; above it requests get 503 (default: no limit)"
    add("--max-num-queued-reqs", type=int, metavar="N", help=text)
    text = "prompt tokens without a first output token at which requests get 503 (default: no limit)"
    add("--max-num-queued-tokens", type=parse_count, metavar="N", help=text)
    text = "time that requests get to end after a SIGTERM (default: 30)"
    add("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help=text)
    for switch in WITHOUT_EFFECT:
        add(f"--{switch}", action="store_true", help=argparse.SUPPRESS)


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("chats, tools and reasoning").add_argument
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template for chats, instead of the model's own")
    option = "--default-chat-template-kwargs"
    text = "what the template of every chat gets; a request's own override them"
    add(option, "--chat-template-kwargs", type=reader(parse_json_object, option), default={}, metavar="JSON", help=text)
    text = "let the model choose whether it calls a tool; --tool-call-parser is auto if it is not given"
    add("--enable-auto-tool-choice", action="store_true", help=text)
    text = "how the model writes calls of tools (docs/serving.md), auto: as its chat template does"
    add("--tool-call-parser", metavar="NAME", help=text)
    text = "how the model marks its thoughts (docs/serving.md), auto: as its chat template does (default: it has none)"
    add("--reasoning-parser", metavar="NAME", help=text)


def _add_cors_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scripts of other origins in browsers (CORS)").add_argument
    texts = {
        "origins": """whose scripts may use the server, such as '["https://a.org"]'; '["*"]' is all (default: none)""",
        "methods": "methods that they may use (default: all)",
        "headers": "headers that they may send (default: all)",
    }
    for kind, text in texts.items():
        flag = f"--allowed-{kind}"
        add(flag, type=reader(parse_json_list, flag), metavar="JSON", help=text)
    add("--allow-credentials", action="store_true", help="let them send cookies and certificates")


def _add_tls_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("TLS").add_argument
    add("--ssl-certfile", metavar="FILE", help="certificate in PEM format")
    add("--ssl-keyfile", metavar="FILE", help="its private key, if the certificate's file has none")
    add("--ssl-ca-certs", metavar="FILE", help="authorities that certificates of clients come from")
    text = "whether clients need a certificate: 0 no, 1 optional, 2 required (default: 0)"
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=int(ssl.CERT_NONE), help=text)


def _cors(args: argparse.Namespace) -> CorsOptions | None:
    from kvllm.serving.state import CorsOptions

    names = ("allowed_methods", "allowed_headers", "allow_credentials")
    if args.allowed_origins is None:
        if given := next((name for name in names if getattr(args, name)), None):
            raise ConfigError(f"--{given.replace('_', '-')} needs --allowed-origins")
        return None
    methods, headers, credentials = (getattr(args, name) for name in names)
    return CorsOptions(args.allowed_origins, methods or ("*",), headers or ("*",), credentials)


def _lora_modules(given: Iterable[str]) -> dict[str, str]:
    """The directories, or ids, of adapters by name."""
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path or name in found:
            raise ConfigError(f"--lora-modules {text!r} is not allowed: NAME=PATH or NAME=ID, each name once")
        found[name] = path
    return found


def _root_path(path: str) -> str:
    """Without a slash at its end, as ASGI has it."""
    path = path.rstrip("/")
    if path and not path.startswith("/"):
        raise ConfigError(f"--root-path {path!r} is not allowed: it begins with a slash, as /{path} does")
    return path


def _tls(args: argparse.Namespace) -> dict[str, object]:
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    if args.ssl_certfile is None:
        if given := next((name for name in names if getattr(args, name) is not None), None):
            raise ConfigError(f"--{given.replace('_', '-')} needs --ssl-certfile")
        return {}
    return {name: getattr(args, name) for name in names} | {"ssl_cert_reqs": args.ssl_cert_reqs}
