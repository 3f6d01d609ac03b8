//! Downloads by the built binary from a mock of the hub.

use crate::support::hub::{Body, COMMIT, Hub, Response};
use crate::support::model_dir;
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use crate::support::wait_until;
use pegainfer_testing::gguf::{Value, Writer};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

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
fn a_model_too_large_for_this_machine_is_refused_before_its_weights() {
    let (home, mut files) = (TempDir::new("memory"), tiny());
    let mut config: serde_json::Value = serde_json::from_slice(&files["config.json"]).unwrap();
    // 80 TB in bf16.
    for (field, value) in [("hidden_size", 1 << 17), ("intermediate_size", 1 << 20), ("num_hidden_layers", 100)] {
        config[field] = json!(value);
    }
    files.insert("config.json".into(), config.to_string().into_bytes());
    let hub = Hub::start(files);
    hub.behaviour.lock().unwrap().listing = Some(|listing| listing["siblings"][4]["lfs"]["size"] = json!(1u64 << 60));
    let generate = ["generate", "x", "--device", "cpu", "--model-path", "test/tiny"];
    let error = refused(&mut command(&hub, &home.0, &generate));
    let start = format!("error: test/tiny on http://{} cannot be served: its weights take ", hub.address);
    assert!(error.starts_with(&start), "{error}");
    assert!(
        error.contains(" GB, more than fits this machine's ") && error.contains(" GB fit, which is a model"),
        "{error}"
    );
    assert_eq!(hub.seen().len(), 2, "more than the listing and config.json: {:?}", hub.seen());
    // Another machine may serve it, so that pull only warns. This disk is too small, too.
    let (_, _, stderr) = run(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    let lines: Vec<&str> = stderr.lines().collect();
    let [warning, error] = lines.as_slice() else { panic!("{stderr}") };
    assert!(warning.contains("WARN") && warning.contains("cannot be served on this machine: its weights"), "{warning}");
    assert!(error.starts_with("error: test/tiny needs 1.15 EB"), "{error}");
}

#[test]
fn pull_resumes_prints_the_path_and_takes_revisions() {
    let (home, hub) = (TempDir::new("pull"), Hub::start(tiny()));
    // More breaks than retries.
    hub.behaviour.lock().unwrap().break_off = Some(("model.safetensors".into(), 1 << 20, 4));
    let error = refused(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    assert!(error.contains("start again to resume it"), "{error}");
    let list = run(&mut command(&hub, &home.0, &["models"])).1;
    let whole = tiny()["model.safetensors"].len() as u64;
    let (_, percent) = list.split_once("incomplete, ").unwrap_or_else(|| panic!("{list}"));
    let percent: u64 = percent.split(' ').next().unwrap().parse().unwrap();
    // Small files count too.
    let expected = (4 << 20) * 100 / whole;
    assert!((expected..=expected + 5).contains(&percent), "{percent} % of {whole} bytes: {list}");
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
fn a_killed_pull_loses_no_byte_of_any_shard() {
    const BYTES: usize = 300_000;
    const BEFORE: usize = 100_000;
    let shard = |i: usize| format!("model-0000{i}-of-00003.safetensors");
    let content = |i: usize| (0..BYTES).map(|byte| (byte * (i + 3) % 251) as u8).collect::<Vec<_>>();
    let mut files = tiny();
    files.remove("model.safetensors");
    let map: serde_json::Map<String, serde_json::Value> = (1..4).map(|i| (i.to_string(), json!(shard(i)))).collect();
    files.insert("model.safetensors.index.json".into(), json!({"weight_map": map}).to_string().into_bytes());
    files.extend((1..4).map(|i| (shard(i), content(i))));
    let (home, hub) = (TempDir::new("killed"), Hub::start(files.clone()));
    let served = files.clone();
    hub.behaviour.lock().unwrap().fault = Some(Box::new(move |path, _| {
        let bytes = served.get(path.rsplit('/').next()?).filter(|_| path.ends_with(".safetensors"))?;
        Some(Response { status: 200, headers: vec![], body: Body::Stalled(BYTES, bytes[..BEFORE].to_vec()) })
    }));
    let mut pull = command(&hub, &home.0, &["pull", "test/tiny"]).stderr(Stdio::null()).spawn().unwrap();
    // All shards are downloaded at the same time.
    let blobs = home.0.join("hub/models--test--tiny/blobs");
    let partial = || {
        let entries = std::fs::read_dir(&blobs).into_iter().flatten().flatten();
        entries.filter(|entry| entry.metadata().is_ok_and(|data| data.len() == BEFORE as u64)).count()
    };
    wait_until("a part of each shard is there", || partial() == 3);
    pull.kill().unwrap();
    pull.wait().unwrap();
    hub.behaviour.lock().unwrap().fault = None;
    let before = hub.seen().len();
    let (code, _, stderr) = run(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    assert_eq!(code, Some(0), "{stderr}");
    let snapshot = home.0.join("hub/models--test--tiny/snapshots").join(COMMIT);
    let again = hub.seen()[before..].to_vec();
    for i in 1..4 {
        assert_eq!(std::fs::read(snapshot.join(shard(i))).unwrap(), content(i));
        let rest = format!("{} {BEFORE} ", shard(i));
        assert!(again.iter().any(|line| line.contains(&rest)), "{rest}: {again:?}");
    }
}

#[test]
fn a_killed_pull_of_one_large_file_loses_no_byte() {
    const SEGMENT: usize = 64 << 20;
    const BYTES: usize = 2 * SEGMENT + 10_000_000;
    const BEFORE: usize = 100_000;
    let mut files = tiny();
    let content: Vec<u8> = (0..BYTES).map(|byte| (byte >> 10) as u8).collect();
    files.insert("model.safetensors".into(), content.clone());
    let (home, hub) = (TempDir::new("killed-large"), Hub::start(files));
    hub.behaviour.lock().unwrap().fault = Some(Box::new(move |path, from| {
        let from = from.filter(|_| path.ends_with(".safetensors"))?;
        let end = (from + SEGMENT).min(BYTES);
        let range = format!("bytes {from}-{}/{BYTES}", end - 1);
        let body = Body::Stalled(end - from, content[from..from + BEFORE].to_vec());
        Some(Response { status: 206, headers: vec![("Content-Range", range)], body })
    }));
    let mut pull = command(&hub, &home.0, &["pull", "test/tiny"]).stderr(Stdio::null()).spawn().unwrap();
    let kept = |hub: &Hub| {
        let (_, list, _) = run(&mut command(hub, &home.0, &["models"]));
        list.contains("incomplete, 0 %")
    };
    // Three segments at the same time.
    let asked = || hub.seen().iter().filter(|line| line.contains(".safetensors")).count();
    wait_until("all segments are asked for", || asked() == 3);
    // The bytes are sent at once, and may still be on their way.
    std::thread::sleep(std::time::Duration::from_millis(500));
    pull.kill().unwrap();
    pull.wait().unwrap();
    assert!(kept(&hub), "a sparse file is not counted as complete");
    hub.behaviour.lock().unwrap().fault = None;
    let before = hub.seen().len();
    let (code, _, stderr) = run(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    assert_eq!(code, Some(0), "{stderr}");
    let rest: Vec<String> = hub.seen()[before..].iter().filter(|line| line.contains(".safetensors")).cloned().collect();
    for segment in 0..3 {
        let first = format!(" {} ", segment * SEGMENT + BEFORE);
        assert!(rest.iter().any(|line| line.contains(&first)), "{first}: {rest:?}");
    }
    assert_eq!(rest.len(), 3, "{rest:?}");
}

#[test]
fn a_misspelt_command_is_told_as_such() {
    let (code, stdout, stderr) = run(pegainfer().arg("severe"));
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert_eq!(stderr, "error: severe is neither a command nor a model; did you mean pegainfer serve?\n");
    let (code, _, stderr) = run(pegainfer().args(["run", "Qwen/Qwen3-0.6B"]));
    let expected = "error: run is neither a command nor a model; did you mean pegainfer chat?\n";
    assert_eq!((code, stderr.as_str()), (Some(2), expected));
}

#[test]
fn gated_files_name_the_page_with_the_terms() {
    let (home, hub) = (TempDir::new("gated"), Hub::start(tiny()));
    let endpoint = format!("http://{}", hub.address);
    for status in [401, 403] {
        hub.behaviour.lock().unwrap().fault = Some(Box::new(move |path, _| {
            let body = Body::Whole(Vec::new());
            path.contains("/resolve/").then(|| Response { status, headers: vec![], body })
        }));
        let expected = format!(
            "error: {endpoint} refuses the files of test/tiny (HTTP {status}): log in, accept the terms at \
             {endpoint}/test/tiny, and set HF_TOKEN to a token of that account"
        );
        assert_eq!(refused(&mut command(&hub, &home.0, &["pull", "test/tiny"])), expected);
    }
}

#[test]
fn a_busy_hub_is_asked_again_and_named_as_such() {
    let (home, hub) = (TempDir::new("busy"), Hub::start(tiny()));
    let endpoint = format!("http://{}", hub.address);
    for (status, reason) in [
        (429, "the hub limits the rate of requests (HTTP 429): try again in some minutes, or set HF_TOKEN"),
        (503, "the hub is overloaded or being maintained (HTTP 503): try again later"),
    ] {
        hub.behaviour.lock().unwrap().refuse = Some(status);
        let before = hub.seen().len();
        let error = refused(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
        assert_eq!(error, format!("error: {endpoint} does not list the files of test/tiny: {reason}"));
        assert_eq!(hub.seen().len(), before + 4);
    }
    hub.behaviour.lock().unwrap().refuse = None;
    let asked = std::sync::atomic::AtomicBool::new(false);
    hub.behaviour.lock().unwrap().fault = Some(Box::new(move |_, _| {
        let headers = vec![("Retry-After", "2".to_owned())];
        let is_first = !asked.swap(true, std::sync::atomic::Ordering::Relaxed);
        is_first.then(|| Response { status: 429, headers, body: Body::Whole(Vec::new()) })
    }));
    let started = Instant::now();
    let (code, _, stderr) = run(&mut command(&hub, &home.0, &["pull", "test/tiny"]));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(started.elapsed().as_secs() >= 2, "Retry-After was not kept");
}

#[test]
fn cache_token_and_authorities_come_from_the_usual_variables() {
    let (home, hub) = (TempDir::new("variables"), Hub::start(tiny()));
    let (cache, token) = (home.0.join("cache"), home.0.join("my-token"));
    std::fs::write(&token, "secret\n").unwrap();
    let mut pull = command(&hub, &home.0, &["pull", "test/tiny"]);
    let (code, stdout, stderr) = run(pull.env("HF_HUB_CACHE", &cache).env("HF_TOKEN_PATH", &token));
    let snapshot = cache.join("models--test--tiny/snapshots").join(COMMIT);
    assert_eq!((code, stdout), (Some(0), format!("{}\n", snapshot.display())), "{stderr}");
    assert!(hub.seen().iter().all(|line| line.ends_with(" Bearer secret")), "{:?}", hub.seen());

    // A server with a certificate of its own stands for a mirror inside of a company.
    let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name);
    let (cert, key) = (fixture("cert.pem"), fixture("key.pem"));
    let mut server = pegainfer();
    server.arg("--tls-cert").arg(&cert).arg("--tls-key").arg(&key);
    let server = Process::start_with_log(Stdio::null(), &mut server);
    let pull = |file: Option<&Path>| {
        let mut pull = pegainfer();
        pull.args(["pull", "test/tiny"]).env("HF_HOME", &home.0);
        pull.env("HF_ENDPOINT", format!("https://localhost:{}", server.address.port()));
        if let Some(file) = file {
            pull.env("SSL_CERT_FILE", file);
        }
        refused(&mut pull)
    };
    assert!(pull(None).contains("invalid peer certificate"), "{}", pull(None));
    assert!(pull(Some(&cert)).contains(" has no model test/tiny"), "{}", pull(Some(&cert)));
    assert!(pull(Some(&key)).ends_with("key.pem is not used: it holds no certificate"), "{}", pull(Some(&key)));
    for args in [&["pull", "test/tiny"][..], &["generate", "x", "--model-path", "test/tiny"]] {
        let mut command = pegainfer();
        command.args(args).arg("--hub-ca").arg(&cert).env("HF_HOME", &home.0).env("SSL_CERT_FILE", &key);
        command.env("HF_ENDPOINT", format!("https://localhost:{}", server.address.port()));
        let error = refused(&mut command);
        assert!(error.contains(" has no model test/tiny"), "{error}");
    }
}

#[test]
fn a_missing_directory_that_looks_like_an_id_is_told_as_both() {
    let (home, hub) = (TempDir::new("both"), Hub::start(tiny()));
    let error = refused(&mut command(&hub, &home.0, &["generate", "x", "--model-path", "models/tiny"]));
    let expected = format!("http://{} has no model models/tiny, or it is private and HF_TOKEN is missing", hub.address);
    assert_eq!(error, format!("error: {expected}; and there is no directory models/tiny here"));
}
