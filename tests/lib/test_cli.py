"""The command line."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest
from opsbyte import cost, models, roofline
from opsbyte.__main__ import main
from opsbyte.hardware import accelerator

BOUND = ["bound", "--model", "llama-3-8b", "--accelerator", "h100-sxm"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "opsbyte", *arguments],
                          capture_output=True, text=True, timeout=60)


def report(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_module_runs_and_imports_nothing_heavy():
    code = ("import sys; from opsbyte.__main__ import main; "
            f"main({BOUND!r}); "
            "print(sorted({'numpy', 'torch', 'matplotlib'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"
    assert "decode:" in done.stdout and "memory bound" in done.stdout


def test_json_is_what_the_library_says(capsys):
    r = report(capsys, *BOUND, "--batch", "4", "--context", "1000",
               "--weight-dtype", "int8", "--devices", "2", "--width", "3")
    m, device = models.model("llama-3-8b"), accelerator("h100-sxm")
    c = cost.decode(m, 1000, 4, weight_dtype="int8", width=3)
    phase = r["phases"]["decode"]
    assert phase["flops"] == c.flops and phase["bytes"] == c.bytes
    assert phase["seconds"] == roofline.time(c, device, devices=2)
    assert phase["tokens_per_second"] == pytest.approx(12 / phase["seconds"])
    assert [o["name"] for o in phase["operators"]] == [o.name for o in c.operators]
    assert r["phases"]["prefill"]["tokens"] == 4000
    assert r["memory_needed"] == cost.memory(m, 1003, 4, weight_dtype="int8")
    assert r["memory_available"] == 160e9
    assert r["critical_batch"] == roofline.critical_batch(
        m, device, weight_dtype="int8")


def test_phase_and_ideal(capsys):
    r = report(capsys, *BOUND, "--phase", "decode", "--ideal")
    assert list(r["phases"]) == ["decode"]
    assert (r["efficiency"], r["overhead"]) == (1, 0)
    c = cost.decode(models.model("llama-3-8b"), 2048)
    ideal = roofline.time(c, accelerator("h100-sxm"), efficiency=1, overhead=0)
    assert r["phases"]["decode"]["seconds"] == ideal


def test_warns_when_it_does_not_fit(capsys):
    big = ["bound", "--model", "llama-3-70b", "--accelerator", "h100-sxm",
           "--batch", "32", "--context", "8192"]
    main(big)
    out = capsys.readouterr().out
    assert "WARNING: it does not fit" in out and "At least 3 devices" in out
    main([*big, "--devices", "3"])
    assert "WARNING" not in capsys.readouterr().out


def test_table_lines_up(capsys):
    main([*BOUND, "--phase", "decode"])
    lines = capsys.readouterr().out.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    header = lines[rule - 1]
    for line in lines[rule + 1:rule + 14]:
        assert line.split()[-1] in ("memory", "compute", "overhead")
        assert line.index(line.split()[-1]) == header.index("bound")


def test_reads_a_config_json(tmp_path, capsys):
    path = tmp_path / "my-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "tie_word_embeddings": False}))
    r = report(capsys, "bound", "--model", str(path), "--accelerator", "h100-sxm")
    assert r["model"] == "my-llama"
    c = cost.decode(models.model("llama-2-7b"), 2048)
    assert r["phases"]["decode"]["flops"] == c.flops


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.svg"
    assert main([*BOUND, "--plot", str(path)]) == 0
    assert "<svg" in path.read_text(encoding="utf-8")


def test_list(capsys):
    r = report(capsys, "list")
    assert "h100-sxm" in r["accelerators"] and "llama-3-70b" in r["models"]
    main(["list"])
    out = capsys.readouterr().out
    for name in (*r["accelerators"], *r["models"]):
        assert name in out


def test_measure_prints_what_measure_found(monkeypatch, capsys):
    measure = pytest.importorskip("opsbyte.measure")
    asked = []

    def this_machine(dtype, refresh=False):
        asked.append((dtype, refresh))
        return accelerator("h100-sxm")

    monkeypatch.setattr(measure, "this_machine", this_machine)
    r = report(capsys, "measure", "--dtype", "bf16", "--refresh")
    assert asked == [("bf16", True)]
    assert (r["flops"], r["bandwidth"]) == (989e12, 3.35e12)
    main(["measure", "--dtype", "bf16"])
    assert "ridge      295 FLOP/byte" in capsys.readouterr().out


def test_measure_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "opsbyte.measure", raising=False)
    monkeypatch.delattr("opsbyte.measure", raising=False)
    assert main(["measure"]) == 2
    error = capsys.readouterr().err
    assert "measure needs torch" in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (["bound", "--model", "lama-3-8b", "--accelerator", "h100-sxm"], "llama-3-8b"),
    (["bound", "--model", "llama-3-8b", "--accelerator", "h100"], "h100-sxm"),
    ([*BOUND, "--dtype", "int9"], "int9"),
    ([*BOUND, "--batch", "0"], "batch"),
    ([*BOUND, "--context", "-1"], "-1"),
    ([*BOUND, "--devices", "0"], "devices"),
    (["bound", "--model", "missing.json", "--accelerator", "h100-sxm"], "missing.json"),
    ([*BOUND, "--plot", "/nowhere/x.png"], "/nowhere/x.png")])
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["bound"], ["list", "--nothing"],
                                       [*BOUND, "--batch", "many"]])
def test_bad_arguments_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_config_that_is_not_one(tmp_path, capsys):
    for text in ("not json", "[]", json.dumps({"model_type": "unheard-of"})):
        path = tmp_path / "config.json"
        path.write_text(text)
        arguments = ["bound", "--model", str(path), "--accelerator", "h100-sxm"]
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_exit_code_and_stderr_of_the_process():
    done = run("bound", "--model", "nope", "--accelerator", "h100-sxm")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("opsbyte: ") and "Traceback" not in done.stderr
