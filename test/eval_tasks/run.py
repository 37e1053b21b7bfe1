"""lm-evaluation-harness with one model more: `rwkv-completions` is its local-completions, with the chat template of the server.

    python test/eval_tasks/run.py run --model rwkv-completions --apply_chat_template --tasks … \
        --model_args base_url=http://127.0.0.1:8000/v1/completions,model=rwkv,tokenized_requests=True

The harness (0.4.13) reads the template from /tokenizer_info, but its local-completions does not use it: log-likelihoods with
--apply_chat_template end with "object has no attribute 'rstrip'".
"""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI


@register_model("rwkv-completions")
class RwkvCompletions(LocalCompletionsAPI):
    """local-completions that renders conversations itself."""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt that a conversation becomes."""
        return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)


if __name__ == "__main__":
    cli_evaluate()
