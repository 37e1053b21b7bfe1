"""POST /FIM/v1/batch-FIM: the text between each prefix and its suffix."""

from typing import ClassVar

from pydantic import Field

from routes.http.context import RequestContext
from routes.http.streams import Reply
from routes.native.chat import NATIVE_ID, reply_to
from routes.schemas import PromptsBody, Texts
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.text import prompts


class FimBody(PromptsBody):
    """Prefixes and suffixes, pair by pair. A row also ends at the mark that would begin the next one, unless `ignore_eos`."""

    field: ClassVar[str] = "prefix"
    prefix: Texts = Field(default_factory=list)
    suffix: Texts = Field(default_factory=list)
    stop_tokens: list[int | str] = Field(default_factory=list)

    def texts(self) -> list[str]:
        """One prompt for each pair. Raises InvalidRequest when one list is longer."""
        if len(self.prefix) != len(self.suffix):
            raise InvalidRequest(
                f"prefix and suffix: as many of each, not {len(self.prefix)} and {len(self.suffix)}", param="suffix"
            )
        return [prompts.fill_in(prefix, suffix) for prefix, suffix in zip(self.prefix, self.suffix, strict=True)]

    def stops(self, config: Config) -> tuple[list[int], list[bytes]]:
        """See SamplingBody."""
        ids, texts = super().stops(config)
        return ids, texts if self.ignore_eos else [*texts, prompts.FIM_MARK.encode()]


async def batch_fim(context: RequestContext) -> Reply:
    """Fill in each gap."""
    return await reply_to(context, FimBody, NATIVE_ID, "FIM.completion")
