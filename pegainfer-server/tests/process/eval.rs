//! `pegainfer eval` with the bundled model, and flags that change config.json.

use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn quality(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/quality").join(file)
}

/// Runs `eval`: exit code, JSON or null, standard error.
fn eval(task: &str, file: &Path, flags: &[&str]) -> (Option<i32>, Value, String) {
    let mut command = pegainfer();
    command.args(["eval", task]).arg(file).args(["--json", "--threads", "2", "--device", "cpu"]).args(flags);
    let (code, out, err) = run(&mut command);
    (code, serde_json::from_str(&out).unwrap_or_default(), err)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn perplexity_depends_on_the_window_and_little_on_fp8() {
    let file = quality("stories.txt");
    let measure = |flags: &[&str]| {
        let (code, result, err) = eval("perplexity", &file, flags);
        assert_eq!(code, Some(0), "{err}");
        result
    };
    let plain = measure(&[]);
    let (tokens, perplexity) = (number(&plain["tokens"]), number(&plain["perplexity"]));
    assert!(perplexity > 1.5 && perplexity < 100.0 && tokens > 500.0, "{plain}");
    assert!((number(&plain["nats"]) / (tokens - 1.0) - perplexity.ln()).abs() < 1e-9, "{plain}");
    let bits = number(&plain["nats"]) / 2f64.ln() / number(&plain["bytes"]);
    assert!((number(&plain["bits_per_byte"]) - bits).abs() < 1e-9);
    let bytes = std::fs::metadata(&file).unwrap().len() as f64;
    assert!(number(&plain["bytes"]) < bytes && number(&plain["bytes"]) > bytes - 20.0, "all but the first token");
    // Each token of overlapping windows counts once. A shorter context predicts worse.
    let short = measure(&["--window", "32", "--stride", "8"]);
    assert!(number(&short["perplexity"]) > perplexity && short["tokens"] == plain["tokens"], "{short}");
    assert_eq!(measure(&["--window", "8", "--stride", "1"])["bytes"], plain["bytes"]);
    let fp8 = measure(&["--quantization", "fp8"]);
    assert_ne!(fp8["nats"], plain["nats"]);
    assert!((number(&fp8["perplexity"]) / perplexity - 1.0).abs() < 0.02, "{fp8}");
    let fp8_kv = measure(&["--kv-cache-dtype", "fp8"]);
    assert_ne!(fp8_kv["nats"], plain["nats"]);
    assert!((number(&fp8_kv["perplexity"]) / perplexity - 1.0).abs() < 0.02, "{fp8_kv}");
    for (name, same) in [("auto", &plain), ("bf16", &plain), ("fp8_e4m3", &fp8_kv)] {
        assert_eq!(measure(&["--kv-cache-dtype", name])["nats"], same["nats"], "{name}");
    }
}

#[test]
fn problems_are_asked_and_counted() {
    let (code, result, err) = eval("gsm8k", &quality("problems.jsonl"), &["--limit", "3", "--max-tokens", "24"]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!((&result["problems"], &result["shots"]), (&json!(3), &json!(0)));
    assert!(number(&result["correct"]) <= 3.0 && number(&result["interval"][1]) > 0.0, "{result}");

    let dir = TempDir::new("eval");
    let file = dir.0.join("own.jsonl");
    std::fs::write(&file, r#"{"question": "What is the capital of France?", "answer": "It is 0.\n#### 0"}"#).unwrap();
    let own = file.to_str().unwrap();
    let (code, result, err) = eval("gsm8k", &file, &["--shots", "1", "--examples", own, "--max-tokens", "8"]);
    assert_eq!((code, &result["shots"], &result["problems"]), (Some(0), &json!(1), &json!(1)), "{err}");
    let (code, _, err) = eval("gsm8k", &file, &["--shots", "2", "--examples", own]);
    assert!(code == Some(1) && err.contains("--shots 2: --examples has 1 problems"), "{err}");
}

#[test]
fn flags_that_cannot_work_are_refused() {
    let file = quality("stories.txt");
    for (flags, words) in [
        (&["--window", "64", "--stride", "64"][..], "--stride 64: it must be below the window of 64 tokens"),
        (&["--window", "5000"], "--window 5000: expected 2 to 4095"),
        (&["--rope-scaling", r#"{"rope_type": "linear", "factor": 2}"#], "serves plain RoPE, and rope_type yarn"),
    ] {
        let (code, _, err) = eval("perplexity", &file, flags);
        assert!(code == Some(1) && err.contains(words), "{err}");
    }
    for flags in [["--rope-scaling", "[]"], ["--quantization", "int3"], ["--kv-cache-dtype", "fp8_e5m2"]] {
        assert_eq!(eval("perplexity", &file, &flags).0, Some(2));
    }
    let yarn = r#"{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}"#;
    let (code, result, err) = eval("perplexity", &file, &["--rope-scaling", yarn, "--window", "5000"]);
    assert_eq!((code, &result["window"]), (Some(0), &json!(5000)), "{err}");
}
