"""The table of routes: what answers where, and what needs no password."""

from typing import Literal, NamedTuple

from routes import admin, dialects, mistral, models, page
from routes.anthropic import messages
from routes.http.context import Access, Handler
from routes.http.replies import Form
from routes.llamacpp import completion
from routes.native import adapters, batch, big_batch, chat, fim, state, translate, tuned
from routes.ollama import about, generation
from routes.openai import chat as openai_chat
from routes.openai import responses, tokens


class Route(NamedTuple):
    """One line of the table."""

    method: str
    path: str
    handler: Handler
    access: Access = "password"
    form: Form | Literal["chat"] = "native"  # of errors; chat: as dialects.form_of_errors says
    may_be_empty: bool = False  # a POST without a body is one with an empty object
    takes_file: bool = False  # the body is a file, the fields are in the URL


def openai_routes(base: str) -> list[Route]:
    """The OpenAI routes under a base URL that ends in /v1, and what tools look for beside it."""
    beside = base.removesuffix("/v1")
    at = {
        f"{base}/completions": ("POST", openai_chat.completions),
        f"{base}/embeddings": ("POST", openai_chat.embeddings),
        f"{base}/fim/completions": ("POST", mistral.fim_completions),
        f"{base}/responses": ("POST", responses.create),
        f"{base}/responses/input_tokens": ("POST", responses.count),
    }
    for start in (base, beside):
        at |= {
            f"{start}/tokenize": ("POST", tokens.tokenize),
            f"{start}/detokenize": ("POST", tokens.detokenize),
            f"{start}/apply_template": ("POST", tokens.apply_template),
            f"{start}/apply-template": ("POST", tokens.apply_template),
            f"{start}/tokenizer_info": ("GET", tokens.tokenizer_info),
        }
    public = {f"{base}/models": dialects.models, f"{base}/models/*model": dialects.model}
    public |= {f"{start}/health": openai_chat.health for start in (base, beside)}
    return [
        *(Route(method, path, handler, form="openai") for path, (method, handler) in at.items()),
        *(Route("GET", path, handler, access="open", form="openai") for path, handler in public.items()),
        Route("GET", f"{base}/responses/:response", responses.retrieve, form="openai"),
        Route("DELETE", f"{base}/responses/:response", responses.delete, form="openai"),
    ]


ROUTES = [
    Route("POST", "/v1/chat/completions", dialects.chat_completions, form="chat"),
    Route("POST", "/chat/completions", dialects.chat_completions, form="chat"),  # as RWKV-Infer and RWKV-Runner have it
    Route("POST", "/completions", openai_chat.completions, form="openai"),
    Route("POST", "/openai/v1/chat/completions", openai_chat.chat_completions, form="openai"),
    *openai_routes("/v1"),
    *openai_routes("/openai/v1"),
    Route("POST", "/v1/messages", messages.create, form="anthropic"),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, form="anthropic"),
    Route("POST", "/api/chat", generation.chat),
    Route("POST", "/api/generate", generation.generate),
    Route("POST", "/api/show", about.show),
    Route("GET", "/api/ps", about.running),
    Route("GET", "/api/tags", about.tags, access="open"),
    Route("GET", "/api/version", about.version, access="open"),
    Route("POST", "/infill", completion.infill, form="openai"),
    Route("POST", "/completion", completion.completion, form="openai"),
    Route("GET", "/props", completion.props, form="openai"),
    Route("POST", "/v2/chat/completions", chat.completions_v2),
    Route("POST", "/v3/chat/completions", chat.completions_v3),
    Route("POST", "/FIM/v1/batch-FIM", fim.batch_fim),
    Route("POST", "/translate/v1/batch-translate", translate.batch_translate, access="translate"),
    Route("POST", "/v1/immersive_translate", translate.batch_translate, access="translate"),
    Route("POST", "/big_batch/completions", big_batch.completions),
    Route("GET", "/big_batch/completions-status", big_batch.completions_status),
    Route("POST", "/big_batch/clean", big_batch.clean, access="admin", may_be_empty=True),
    Route("POST", "/state/chat/completions", state.completions),
    Route("POST", "/multi_state/chat/completions", state.dialogue),
    Route("POST", "/state/status", state.status, may_be_empty=True),
    Route("POST", "/state/delete", state.delete),
    Route("POST", "/state/fork", state.fork),
    Route("POST", "/state/rewind", state.rewind),
    Route("POST", "/state/export", state.export),
    Route("POST", "/state/import", state.import_file, takes_file=True),
    Route("POST", "/loadstatemodel", tuned.load_state, access="admin"),
    Route("POST", "/loadadapter", adapters.load_adapter, access="admin"),
    Route("POST", "/removeadapter", adapters.remove_adapter, access="admin", may_be_empty=True),
    Route("POST", "/mrss_loadstatemodel", tuned.load_mix, access="admin"),
    Route("POST", "/mrss_set_gatingweight", tuned.set_weights, access="admin"),
    Route("POST", "/removestatemodel", tuned.remove, access="admin", may_be_empty=True),
    Route("POST", "/v1/batch/completions", batch.completions),
    Route("POST", "/v1/tokens/count", batch.tokens_count),
    Route("POST", "/loadmodel", models.load, access="admin"),
    Route("POST", "/removemodel", models.remove, access="admin", may_be_empty=True),
    Route("POST", "/switch-model", models.switch, access="admin"),
    Route("GET", "/models", models.index, access="open"),
    Route("GET", "/v1/server/status", admin.server_status, access="admin"),
    Route("POST", "/v1/server/stop", admin.server_stop, access="admin", may_be_empty=True),
    Route("GET", "/healthz", admin.healthz, access="open"),
    Route("GET", "/healthcheck", admin.healthz, access="open"),
    Route("GET", "/readyz", admin.readyz, access="open"),
    Route("GET", "/metrics", admin.figures, access="admin"),
    Route("GET", "/stats", admin.stats, access="admin"),
    Route("GET", "/", admin.index, access="open"),  # its JSON form asks for the password itself
    *(Route("GET", f"/web/{name}", page.handler(name), access="open") for name in page.FILES),
]
