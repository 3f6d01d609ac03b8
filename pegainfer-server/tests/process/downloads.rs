//! Downloads by the built binary from a mock of the hub.

use crate::support::hub::{COMMIT, Hub};
use crate::support::model_dir;
use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use pegainfer_testing::gguf::{Value, Writer};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The bundled model, as the hub would have it.
fn tiny() -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(model_dir()).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())).collect()
}

/// A command that uses `hub`, and a cache in `home`.
fn command(hub: &Hub, home: &Path, args: &[&str]) -> Command {
    let mut command = pegainfer();
    command.env("HF_ENDPOINT", format!("http://{}", hub.address)).env("HF_HOME", home).args(args);
    command
}

/// The error line of a command that fails.
fn refused(command: &mut Command) -> String {
    let (code, stdout, stderr) = run(command);
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
    stderr.lines().last().unwrap().to_owned()
}

#[test]
fn an_unserved_model_costs_less_than_100_kb() {
    let home = TempDir::new("unserved");
    let awq8 = json!({"quant_method": "awq", "bits": 3, "group_size": 128});
    let mut quantised: serde_json::Value = serde_json::from_slice(&tiny()["config.json"]).unwrap();
    quantised["quantization_config"] = awq8;
    let llama = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"});
    for (config, reason) in [
        (llama, "config.json describes LlamaForCausalLM, which is not supported; supported are Qwen3ForCausalLM"),
        (quantised, "config.json asks for "),
    ] {
        let mut files = tiny();
        files.insert("config.json".into(), config.to_string().into_bytes());
        check_cheap(files, &home.0, "test/tiny", reason);
    }
    let mut files = tiny();
    files.insert("adapter_config.json".into(), b"{}".to_vec());
    files.remove("config.json");
    check_cheap(files, &home.0, "test/tiny", "it is an adapter such as LoRA, which is not supported");
    let mut writer = Writer::default();
    writer.pair("general.architecture", "llama");
    writer.pair("tokenizer.ggml.tokens", Value::Texts(vec!["token".into(); 100_000]));
    let files = [("tiny-Q4_K_M.gguf".to_owned(), writer.bytes())].into();
    check_cheap(files, &home.0, "test/tiny:Q4_K_M", "its architecture is llama, and qwen3, qwen3moe, ");
}

/// Checks that the model is refused for a reason, at small cost.
fn check_cheap(files: BTreeMap<String, Vec<u8>>, home: &Path, id: &str, reason: &str) {
    let hub = Hub::start(files);
    let error = refused(&mut command(&hub, home, &["generate", "x", "--model-path", id]));
    assert!(error.contains(&format!("{id} on http://{} cannot be served: {reason}", hub.address)), "{error}");
    let sent = hub.behaviour.lock().unwrap().sent;
    assert!(sent < 100_000, "{sent} bytes for: {error}");
}

#[test]
fn size_and_free_space_come_before_the_first_byte_of_weights() {
    let (home, hub) = (TempDir::new("space"), Hub::start(tiny()));
    let weights = tiny().keys().position(|name| name == "model.safetensors").unwrap();
    assert_eq!(weights, 4, "the index below");
    hub.behaviour.lock().unwrap().listing = Some(|listing| listing["siblings"][4]["lfs"]["size"] = json!(1u64 << 60));
    let generate = ["generate", "The capital of France is", "--temperature", "0", "--model-path", "test/tiny"];
    let error = refused(&mut command(&hub, &home.0, &generate));
    let (start, end) = error.split_once(" are free in ").unwrap_or_else(|| panic!("{error}"));
    assert!(start.starts_with("error: test/tiny needs 1.15 EB, and "), "{error}");
    let dir = home.0.join("hub");
    assert_eq!(end, format!("{}: free disk space, or point HF_HOME to another disk", dir.display()));
    let asked: Vec<String> = hub.seen().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(asked[1..], [format!("/test/tiny/resolve/{COMMIT}/config.json")]);

    hub.behaviour.lock().unwrap().listing = None;
    let (code, stdout, stderr) = run(&mut command(&hub, &home.0, &generate));
    assert_eq!((code, stdout.as_str()), (Some(0), " Paris.\n"), "{stderr}");
    let told = format!("MB of test/tiny to {}: ", dir.display());
    assert!(stderr.contains(&told) && stderr.contains("in 6 files"), "{stderr}");
}

#[test]
fn pull_resumes_prints_the_path_and_takes_revisions() {
    let (home, hub) = (TempDir::new("pull"), Hub::start(tiny()));
    // More breaks than retries.
    hub.behaviour.lock().unwrap().break_off = Some(("model.safetensors".into(), 1 << 20, 4));
    let error = refused(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    assert!(error.contains("start again to resume it"), "{error}");
    let before = hub.seen().len();
    let snapshot = home.0.join("hub/models--test--tiny/snapshots").join(COMMIT);
    let (code, stdout, stderr) = run(&mut command(&hub, &home.0, &["models", "pull", "test/tiny"]));
    assert_eq!((code, stdout), (Some(0), format!("{}\n", snapshot.display())), "{stderr}");
    let again: Vec<String> = hub.seen()[before..].to_vec();
    let [_, rest] = again.as_slice() else { panic!("the listing and the rest: {again:?}") };
    assert!(rest.contains(&format!("model.safetensors {} ", 4 << 20)), "{rest}");
    for (name, content) in tiny().iter().filter(|(name, _)| *name != "README.md") {
        assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), *content, "{name}");
    }

    for args in [&["pull", "test/tiny@v1.0"][..], &["pull", "test/tiny", "--revision", "v1.0"]] {
        let (code, stdout, stderr) = run(&mut command(&hub, &home.0, args));
        assert_eq!((code, stdout), (Some(0), format!("{}\n", snapshot.display())), "{stderr}");
        let listing = hub.seen().last().unwrap().clone();
        assert!(listing.starts_with("/api/models/test/tiny/revision/v1.0?blobs=true "), "{listing}");
    }
    let recorded = std::fs::read_to_string(home.0.join("hub/models--test--tiny/refs/v1.0"));
    assert_eq!(recorded.unwrap(), COMMIT);
    let mut offline = command(&hub, &home.0, &["generate", "The capital of France is", "--temperature", "0"]);
    offline.args(["--model-path", "test/tiny", "--revision", "v1.0"]).env("HF_HUB_OFFLINE", "1");
    assert_eq!(run(&mut offline).1, " Paris.\n");

    for id in ["tiny", "/test/tiny", "a/b/c"] {
        let error = refused(&mut command(&hub, &home.0, &["pull", id]));
        assert_eq!(error, format!("error: {id} is not a Hugging Face id such as Qwen/Qwen3-0.6B"));
    }
    let error = refused(&mut command(&hub, &home.0, &["generate", "x", "--revision", "v1.0"]));
    let expected = "--revision v1.0 is for a Hugging Face id without one, such as Qwen/Qwen3-0.6B";
    assert_eq!(error, format!("error: {expected}"));
}

#[test]
fn a_misspelt_command_is_told_as_such() {
    let (code, stdout, stderr) = run(pegainfer().arg("severe"));
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert_eq!(stderr, "error: severe is neither a command nor a model; did you mean pegainfer serve?\n");
}
