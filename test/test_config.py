"""Where a setting comes from, what wins, and what is refused."""

import dataclasses
import sys

import pytest

from rwkv_batch.config import Config, find_model, logs_states
from rwkv_batch.config_sources import load, make_parser
from rwkv_batch.devices import pipeline_devices
from rwkv_batch.errors import UsageError


def test_defaults_are_the_issues():
    config = load([], {})
    assert config == Config()
    assert (config.max_body_mib, config.max_prompts, config.queue, config.port) == (32, 4096, 512, 8000)


def test_flag_wins_over_environment_over_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nqueue = 2\nlog-level = "debug"\nopen_translate = true\ndrain_seconds = 3\npp_devices = [0]\n')
    environ = {"RWKV_BATCH_QUEUE": "3", "RWKV_BATCH_LOG_LEVEL": "error", "RWKV_BATCH_LOG_PROMPTS": "yes", "PORT": "5"}
    config = load(["--config", str(file), "--log-level", "warning"], environ)
    assert (config.port, config.queue, config.log_level) == (1, 3, "warning")
    assert config.open_translate
    assert config.log_prompts
    assert config.drain_seconds == 3.0
    assert config.resolved().device == "cuda:0"
    assert not load(["--config", str(file), "--no-open-translate"], {}).open_translate
    assert load([], {"RWKV_BATCH_CONFIG": str(file)}).port == 1


def test_every_field_has_flag_help_and_environment_name():
    help_text = make_parser().format_help()
    for item in dataclasses.fields(Config):
        assert "--" + item.name.replace("_", "-") in help_text
        assert item.metadata["help"]


@pytest.mark.parametrize("path", ["/usr/bin/rwkv-batch", "app.py"])
def test_help_names_the_command_that_was_given(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    assert make_parser().format_usage().startswith(f"usage: {path.rpartition('/')[2]} ")


@pytest.mark.parametrize(
    ("argv", "environ", "word"),
    [
        (["--port", "x"], {}, "--port"),
        (["--port", "65536"], {}, "--port: must be between 0 and 65535"),
        (["--por", "1"], {}, "--por"),
        (["--drain-seconds", "nan"], {}, "--drain-seconds"),
        (["--http-silence-seconds", "0.5"], {}, "--http-silence-seconds: must be 0 or at least 1"),
        (["--dtype", "int4"], {}, "--dtype"),
        (["--device", "tpu"], {}, "--device"),
        (["--device", "cuda:²"], {}, "--device"),
        (["--port", "1", "stray"], {}, "argument 3"),
        (["--prot", "1"], {}, "--port"),
        ([], {"RWKV_BATCH_PORT": "eight"}, "RWKV_BATCH_PORT: wants a whole number"),
        ([], {"RWKV_BATCH_LOG_PROMPTS": "perhaps"}, "RWKV_BATCH_LOG_PROMPTS"),
        ([], {"RWKV_BATCH_OPS": "magic"}, "--ops"),
    ],
)
def test_wrong_settings_name_their_source(argv, environ, word):
    with pytest.raises(UsageError) as error:
        load(argv, environ)
    assert word in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ["--pasword", "hunter2"],
        ["--pasword=hunter2"],
        ["-password", "hunter2"],
        ["--password", "my", "hunter2"],
        ["hunter2"],
        ["--pasword", "-hunter2"],
    ],
)
def test_a_mistyped_flag_does_not_show_its_secret(argv):
    with pytest.raises(UsageError) as error:
        load(argv, {})
    assert "hunter2" not in error.value.message


@pytest.mark.parametrize("line", ['password = "x"', 'api-keys = "a=x"'])
def test_a_settings_file_with_a_secret_is_its_owners_alone(tmp_path, line):
    file = tmp_path / "settings.toml"
    file.write_text(line)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        load(["--config", str(file)], {})
    file.chmod(0o600)
    assert load(["--config", str(file)], {}) != Config()


def test_model_is_short_for_model_path():
    assert load(["--model", "a.pth"], {}) == load(["--model-path", "a.pth"], {}) == Config(model_path="a.pth")


@pytest.mark.parametrize(
    ("text", "word"),
    [("prot = 1", "prot"), ('port = "1"', "port wants int"), ("port = true", "port"), ("port =", "Invalid"), ("[x]", "x")],
)
def test_wrong_settings_files(tmp_path, text, word):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=word):
        load(["--config", str(file)], {})


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (None, []), ("", []), ("[]", []), ("0", ["0"]), ("[3]", ["3"]), (" [ 1 ] ", ["1"]), ("0,1", ["0", "1"]),
        ("[2, 0, 1]", ["2", "0", "1"]), ("cuda:1,cuda:0", ["1", "0"]), ("cpu,cpu", ["cpu", "cpu"]),
    ],
)  # fmt: skip
def test_pipeline_devices(text, devices, tmp_path):
    assert pipeline_devices(text, {}, tmp_path) == devices


@pytest.mark.parametrize("text", ["a", "0,", "0,0", "-1", "cpu,0", "0,1,7"])
def test_strange_pipeline_devices_are_refused(text):
    with pytest.raises(UsageError, match="--pp-devices"):
        pipeline_devices(text, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_several_pipeline_devices_stay_until_the_engine_is_put_together():
    resolved = load(["--pp-devices", "[cpu,cpu]"], {}).resolved()
    assert (resolved.device, resolved.pipeline_devices, resolved.num_engines) == ("cpu", ["cpu", "cpu"], 1)
    assert resolved.resolved() == resolved


def test_one_pipeline_device_is_the_device():
    assert load(["--pp-devices", "[1]"], {}).resolved().device == "cuda:1"
    assert load(["--pp-devices", "[1]"], {}).resolved().pipeline_devices == []
    with pytest.raises(UsageError, match="cpu"):
        load(["--pp-devices", "1", "--device", "cpu"], {}).resolved()


def test_address_depends_on_the_password():
    assert load([], {}).resolved().host == "127.0.0.1"
    assert load(["--password", "x"], {}).resolved().host == "0.0.0.0"
    assert load(["--password", "x", "--host", "localhost"], {}).resolved().host in ("127.0.0.1", "::1")
    assert load(["--password", ""], {}).resolved().password is None
    assert load(["--host", "127.0.0.1"], {}).loopback
    assert not load(["--host", "0.0.0.0"], {}).loopback


def test_password_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("geheim wört\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        load(["--password-file", str(file)], {}).resolved()
    file.chmod(0o600)
    config = load(["--password-file", str(file)], {"RWKV_BATCH_PASSWORD": "from below"}).resolved()
    assert config.password == "geheim wört"
    assert config.password_file is None
    assert "geheim" not in repr(config)
    with pytest.raises(UsageError, match="one of them"):
        load(["--password-file", str(file), "--password", "x"], {}).resolved()
    file.write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        load(["--password-file", str(file)], {}).resolved()
    with pytest.raises(UsageError, match="cannot read"):
        load(["--password-file", str(tmp_path / "none")], {}).resolved()


def test_model_file(tmp_path):
    with pytest.raises(UsageError, match="--model-path"):
        find_model(Config(), tmp_path)
    with pytest.raises(UsageError, match="--model-path"):
        find_model(Config(model_path=str(tmp_path / "x")))
    file = tmp_path / "rwkv7-0.1b.pth"
    file.touch()
    assert find_model(Config(), tmp_path) == file
    assert find_model(Config(model_path=str(file))) == file
    assert find_model(Config(model_path=str(tmp_path / "rwkv7-0.1b"))) == file
    assert Config(model_path=str(file)).model_name == "rwkv7-0.1b"
    assert Config(model_path=str(file), served_model_name="m").model_name == "m"


@pytest.mark.parametrize(
    ("flags", "environ", "logs"),
    [
        ([], {}, True),
        (["--wkv-log"], {}, True),
        (["--no-wkv-log"], {}, False),
        ([], {"RWKV_BATCH_WKV_LOG": "0"}, False),
        (["--devices", "0,1"], {}, True),
        (["--devices", "0,1", "--tp", "2"], {}, False),
        (["--devices", "0,1", "--tp", "2", "--wkv-log"], {}, True),
        (["--pp-devices", "0,1"], {}, False),
        (["--pp-devices", "0,1"], {"RWKV_BATCH_WKV_LOG": "1"}, True),
    ],
)
def test_states_are_logged_by_default_with_one_gpu_an_engine(flags, environ, logs):
    assert logs_states(load(flags, environ)) is logs
