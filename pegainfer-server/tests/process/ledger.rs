//! The commands `ledger` and `sim`, run as a user would.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::LazyLock;

pub fn pegainfer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pegainfer")).args(args).env_remove("RUST_LOG").output().unwrap()
}

pub fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

/// Measures the ledger of a small engine.
fn measure(file: &Path, model: &str) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(model);
    let (file, model) = (file.to_str().unwrap(), model.to_str().unwrap());
    let size = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--device", "cpu"];
    let args = ["ledger", "--quick", "--out", file, "--model-path", model, "--log-level", "warn"];
    let output = pegainfer(&[&args[..], &size].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let summary = text(&output.stdout);
    assert!(summary.contains("decode") && summary.contains("the engine thread takes"), "{summary}");
}

/// Writes the ledger of qwen3-tiny, which is measured once, to `file`.
fn write_measured(file: &Path) {
    static LEDGER: LazyLock<String> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("measured");
        measure(&file, "qwen3-tiny");
        std::fs::read_to_string(file).unwrap()
    });
    std::fs::write(file, &*LEDGER).unwrap();
}

#[test]
fn a_measured_ledger_predicts_a_workload() {
    let dir = tempfile::tempdir().unwrap();
    for (model, mlp) in
        [("qwen3-tiny", "linear_swiglu"), ("qwen35-tiny", "linear_swiglu"), ("dsv4-tiny-fp4fp8", "routed_experts")]
    {
        let file = dir.path().join(model);
        // Other tests may slow a measured step so much that others are predicted to take no time.
        let plausible = (0..3).any(|_| {
            measure(&file, model);
            let (rates, all_last) = simulated_rates(dir.path(), &file, mlp);
            rates[1] > rates[0] && all_last
        });
        assert!(plausible, "three streams give more than one: {model}");
    }
}

/// Tokens per second of one stream and of three, predicted from the ledger. The report has times and ops, including
/// `mlp`. Also returns whether every step and request on the timeline takes time.
fn simulated_rates(dir: &Path, ledger: &Path, mlp: &str) -> ([f64; 2], bool) {
    let (path, timeline) = (ledger.to_str().unwrap(), dir.join("timeline.json"));
    let workload = ["--concurrency", "1,3", "--prompt-len", "40", "--output-len", "20", "--strict"];
    let output = ["--json", "-", "--timeline", timeline.to_str().unwrap()];
    let output = pegainfer(&[&["sim", path][..], &workload, &output].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!((rows.len(), report["stale"].as_bool()), (2, Some(false)));
    for row in rows {
        let figure = |name: &str| row["median"][name]["p50"].as_f64().unwrap();
        assert!(figure("ttft_ms") > 0.0 && figure("tpot_ms") > 0.0, "{row}");
        // All ops of a step are named, including those of other kinds.
        let ops = row["engine"]["ops"].as_array().unwrap();
        let sum: f64 = ops.iter().map(|op| op[1].as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && ops.iter().any(|op| op[0] == mlp), "{ops:?}");
    }
    let events: Value = serde_json::from_slice(&std::fs::read(&timeline).unwrap()).unwrap();
    let all_last = events.as_array().unwrap().iter().all(|event| event["dur"].as_f64().unwrap() > 0.0);
    ([0, 1].map(|i: usize| rows[i]["median"]["output_tok_s"].as_f64().unwrap()), all_last)
}

#[test]
fn impossible_simulations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ledger");
    let path = file.to_str().unwrap();
    let refusal = |args: &[&str]| {
        let output = pegainfer(&[&["sim", path][..], args].concat());
        assert!(!output.status.success(), "{}", text(&output.stdout));
        text(&output.stderr)
    };
    assert!(refusal(&[]).contains("cannot be read"));
    let other = "{\"record\":1}\n".repeat(100_000);
    std::fs::write(&file, &other).unwrap();
    assert!(refusal(&[]).contains("line 1 is not a line of a ledger"));
    // A file is kept until there is a ledger to replace it with.
    let missing = dir.path().join("no-model");
    assert!(!pegainfer(&["ledger", "--out", path, "--model-path", missing.to_str().unwrap()]).status.success());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), other);
    write_measured(&file);
    let error = refusal(&["--strict", "--concurrency", "8", "--max-num-seqs", "8"]);
    assert!(error.contains("the ledger does not cover"), "{error}");
    assert!(refusal(&["--max-num-seqs", "100"]).contains("--max-num-batched-tokens"));
    assert!(refusal(&["--kv-cache-tokens", "3"]).contains("less than a block"));
    assert!(refusal(&["--slo-ttft", "1us"]).contains("no rate is low enough"));
    // A ledger with other kernels.
    let stale = std::fs::read_to_string(&file).unwrap().replacen("\"kernels\":\"", "\"kernels\":\"0", 1);
    std::fs::write(&file, stale).unwrap();
    assert!(refusal(&["--strict"]).contains("the ledger is stale"));
    let output = pegainfer(&["sim", path, "--slo-tpot", "10s", "--slo-ttft", "500ms", "--requests", "200"]);
    assert!(text(&output.stdout).contains("requests per second"), "{}", text(&output.stderr));
    // `ledger` has written the date.
    let warning = text(&output.stderr);
    let (_, date) = warning.split_once("the ledger is stale: it was measured on ").unwrap();
    assert!(date[..10].parse::<jiff::civil::Date>().is_ok() && date.contains("expect times to differ"), "{warning}");
    assert!(date.contains("measure again with pegainfer ledger"), "{warning}");
}

/// On one rank and on two, where rank 0 is measured.
#[test]
fn steps_of_a_list_are_printed_with_their_ops() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("steps");
    let out = file.to_str().unwrap();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let run = |model: &str, ranks: &str, steps: &str| {
        let model = models.join(model);
        let flags = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--max-model-len", "256"];
        let args =
            ["ledger", "--steps", steps, "--out", out, "--model-path", model.to_str().unwrap(), "--device", "cpu"];
        pegainfer(&[&args[..], &flags, &["--tensor-parallel-size", ranks, "--log-level", "warn"]].concat())
    };
    for (model, ranks, op) in [
        ("qwen3-tiny", "1", "linear_swiglu"),
        ("dsv4-tiny-fp4fp8", "1", "routed_experts"),
        ("dsv4-tiny-fp4fp8", "2", "all_reduce"),
    ] {
        let output = run(model, ranks, "decode:2:129,prefill:40,prefill:16:200");
        let tables = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        for part in ["decode: 2 x 129 tokens of context: ", "prefill: 40 tokens: ", " ms a step; ", op] {
            assert!(tables.contains(part), "{model}: {part:?} is not in {tables}");
        }
        assert_eq!(tables.matches("one after the other").count(), 3, "{tables}");
        let shown = pegainfer(&["ledger", out, "--ops"]);
        assert_eq!(text(&shown.stdout), tables, "{}", text(&shown.stderr));
    }
    // Kernels are recorded only on a GPU. Without CUPTI, the error says what to install.
    let tiny = models.join("qwen3-tiny");
    let flags = ["--device", "cpu", "--cupti", "--model-path", tiny.to_str().unwrap()];
    let output = pegainfer(&[&["ledger", "--steps", "decode:1:64"][..], &flags].concat());
    assert!(!output.status.success() && text(&output.stderr).contains("CUPTI"), "{}", text(&output.stderr));
    let output = pegainfer(&[&["ledger", "--out", out][..], &flags].concat());
    assert!(text(&output.stderr).contains("--steps"), "{}", text(&output.stderr));
    let output = run("dsv4-tiny-fp4fp8", "1", "decode:9:129");
    assert!(text(&output.stderr).contains("does not fit an engine of 3 sequences"), "{}", text(&output.stderr));
}

/// The ledger in `file` with prefill times divided by `factor`, as of a device with faster prefill.
fn with_faster_prompts(file: &Path, factor: f64) -> String {
    let lines = std::fs::read_to_string(file).unwrap();
    let line = |text: &str| {
        let mut line: Value = serde_json::from_str(text).unwrap();
        if let Some(step) = line.get_mut("step").filter(|step| step["prefill_rows"] == 1 && step["decode_rows"] == 0) {
            step["us"] = (step["us"].as_f64().unwrap() / factor).into();
        }
        line.to_string() + "\n"
    };
    lines.lines().map(line).collect()
}

#[test]
fn an_anchor_corrects_the_ledger_of_another_device_and_doctor_compares_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (own, other, anchored) = (path("own"), path("other"), path("anchored"));
    write_measured(Path::new(&own));
    std::fs::write(&other, with_faster_prompts(Path::new(&own), 4.0)).unwrap();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let model = |name: &str| models.join(name).to_str().unwrap().to_owned();
    let (tiny, flags) = (model("qwen3-tiny"), ["--log-level", "warn", "--device", "cpu", "--max-num-seqs", "3"]);
    let anchor = |model: &str| {
        let args = ["ledger", "--anchor", &other, "--out", &anchored, "--model-path", model];
        pegainfer(&[&args[..], &flags, &["--max-num-batched-tokens", "64", "--max-model-len", "256"]].concat())
    };
    let refused = anchor(&model("qwen35-tiny"));
    assert!(text(&refused.stderr).contains("the ledger was measured with the model"), "{}", text(&refused.stderr));
    let output = anchor(&tiny);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = text(&output.stdout);
    assert!(report.contains("factor of prefill steps:") && report.contains("more than 10 % off"), "{report}");
    let factor = |name: &str| -> f64 {
        let line = report.lines().find_map(|line| line.strip_prefix(&format!("factor of {name} steps: ")));
        line.unwrap().parse().unwrap()
    };
    // Other work on this machine may slow down some steps.
    assert!((1.3..40.0).contains(&factor("prefill")), "{report}");
    assert!((0.1..10.0).contains(&factor("small decode")), "{report}");
    let ttft = |ledger: &str| {
        let output = pegainfer(&["sim", ledger, "--concurrency", "1", "--prompt-len", "60", "--json", "-"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["rows"][0]["median"]["ttft_ms"]["p50"].as_f64().unwrap()
    };
    let corrected = ttft(&anchored) / ttft(&other);
    assert!((corrected / factor("prefill") - 1.0).abs() < 0.1, "TTFT is {corrected} times the other's: {report}");

    let doctor = |ledger: &str| pegainfer(&["doctor", "--ledger", ledger, "--model-path", &tiny]);
    let output = doctor(&other);
    let said = text(&output.stdout);
    assert!(!output.status.success() && said.contains("factor of prefill steps:"), "{said}");
    let why = text(&output.stderr);
    assert!(why.contains("the step times of this device differ from the ledger"), "{why}");
    std::fs::write(&other, std::fs::read_to_string(&other).unwrap().replacen("kernels\":\"", "kernels\":\"0", 1))
        .unwrap();
    let output = doctor(&other);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("kernels: ") && said.contains("the kernels have changed since"), "{said}");
}
