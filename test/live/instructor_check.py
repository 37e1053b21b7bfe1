"""instructor against a server, in the environment of `make test-lm-eval`: its pins do not go together with those of the tests.

python test/live/instructor_check.py http://127.0.0.1:8000/v1
"""

import sys
from typing import Literal

import instructor
import openai
import pydantic


class Weather(pydantic.BaseModel):
    """How it is outside."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or the model goes on with properties of its own

    city: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]
    days: int = pydantic.Field(ge=1, le=9)


def main() -> None:
    """Every mode that asks the server for structure, and a list streamed item by item."""
    own = openai.OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
    asked = {"model": "m", "messages": [{"role": "user", "content": "Kyoto?"}], "max_tokens": 300, "seed": 1}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(own, mode=mode)
        found = client.chat.completions.create(response_model=Weather, max_retries=0, **asked)
        assert isinstance(found, Weather), mode
        print(mode, found)
    *_, last = client.chat.completions.create_partial(response_model=Weather, max_retries=0, **asked)
    Weather.model_validate(last.model_dump())
    print("right")


if __name__ == "__main__":
    main()
