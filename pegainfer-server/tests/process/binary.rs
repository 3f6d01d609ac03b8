//! The binary, started as users start it.

use crate::support::client::{get, post_ok, post_unread, post_with, read_head};
use crate::support::hub::Hub;
use crate::support::model_dir;
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

/// The single line of an error message.
fn refused(command: &mut Command) -> String {
    let (code, stdout, stderr) = run(command);
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
    let error = stderr.lines().last().unwrap().to_string();
    assert!(error.starts_with("error: "), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    error
}

#[test]
fn generate_prints_a_completion() {
    let (code, stdout, _) = run(pegainfer().args(["generate", "The capital of France is", "--temperature", "0"]));
    assert_eq!((code, stdout.as_str()), (Some(0), " Paris.\n"));
    let error = refused(pegainfer().args(["generate", "x", "--temperature=-1"]));
    assert_eq!(error, "error: temperature must be a number from 0 to 100, got -1");
    let error = refused(pegainfer().args(["generate", ""]));
    assert_eq!(error, "error: the prompt is empty: send at least one token");
    let error = refused(pegainfer().args(["generate", "x", "--task", "embed"]));
    assert!(error.contains("--task embed: generate needs one that generates text"), "{error}");
}

#[test]
fn the_bundled_model_is_inside_the_executable() {
    let (empty, temporary) = (TempDir::new("empty"), TempDir::new("tmp"));
    let server = Process::start(pegainfer().current_dir(&empty.0).env("TMPDIR", &temporary.0));
    let question =
        json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0});
    let answer = post_ok(server.address, "/v1/chat/completions", &question);
    assert_eq!(answer["model"], "qwen3-tiny");
    assert_eq!(answer["choices"][0]["message"]["content"], "The capital of France is Paris.");
    let card = &get(server.address, "/v1/models").json()["data"][0];
    assert!(card["device"].as_str().is_some_and(|device| device.starts_with("cpu")), "{card}");
    assert_eq!(
        (card["family"].as_str(), card["weight_bytes"].as_u64() > Some(1 << 20)),
        (Some("Qwen3"), true),
        "{card}"
    );
    for dir in [&empty, &temporary] {
        assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 0, "files are left in {}", dir.0.display());
    }
    let error = refused(pegainfer().args(["--port", "0"]).env("TMPDIR", "/no/such/dir"));
    assert!(
        error.starts_with("error: the bundled qwen3-tiny cannot be written to /no/such/dir: set TMPDIR"),
        "{error}"
    );
}

#[test]
fn a_port_in_use_is_reported_immediately() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = refused(pegainfer().args(["--port", &port]));
    let expected = "is in use: stop the program that has it, or give another --port";
    assert_eq!(error, format!("error: port {port} on 127.0.0.1 {expected}"));
    let error = refused(pegainfer().args(["--port", "0", "--grpc-port", &port]));
    assert_eq!(error, format!("error: port {port} on 127.0.0.1 {}", expected.replace("--port", "--grpc-port")));
    let error = refused(pegainfer().args(["--port", "8471", "--grpc-port", "8471"]));
    assert_eq!(error, "error: --grpc-port must be another port than --port");
    let error = refused(pegainfer().args(["--host", "203.0.113.1"]));
    assert_eq!(error, "error: --host 203.0.113.1 is not an address of this machine");
}

#[test]
fn checkpoints_that_cannot_be_served() {
    let dir = TempDir::new("checkpoints");
    let path = dir.0.to_str().unwrap();
    let refused_dir = || refused(pegainfer().args(["serve", "--port", "0", "--model-path", path]));
    assert!(refused_dir().contains("config.json is missing"), "no config");
    std::fs::write(dir.0.join("config.json"), r#"{"architectures": ["LlamaForCausalLM"]}"#).unwrap();
    assert!(refused_dir().contains("LlamaForCausalLM, which is not supported; supported are Qwen3ForCausalLM"));
    std::fs::copy(model_dir().join("config.json"), dir.0.join("config.json")).unwrap();
    assert!(refused_dir().contains("safetensors"), "{}", refused_dir());
    std::fs::copy(model_dir().join("model.safetensors"), dir.0.join("model.safetensors")).unwrap();
    assert!(refused_dir().contains("tokenizer.json is missing"), "{}", refused_dir());
    let error = refused(pegainfer().args(["--port", "0", "--model-path", "/no/such/dir"]));
    assert!(error.contains("is neither a directory, a .gguf file nor a Hugging Face id"), "{error}");
    let error = refused(pegainfer().args(["--port", "0", "--log-level", "loud"]));
    assert!(error.contains("--log-level loud is not a level"), "{error}");
    let error = refused(pegainfer().args(["--threads", "50000", "--port", "0"]));
    assert!(error.starts_with("error: --threads 50000: this process has "), "{error}");
    // With a usable GPU, this would serve.
    if let Err(why) = pegainfer_kernels::cuda::available() {
        let error = refused(pegainfer().args(["--device", "cuda", "--port", "0"]));
        assert!(error.contains(&why) && error.contains("--device cpu"), "{error}");
    }
    if let Ok(count) = pegainfer_kernels::cuda::available() {
        let error = refused(pegainfer().args(["--device", &format!("cuda:{count}"), "--port", "0"]));
        assert!(error.contains(&format!("this machine has {count}")), "{error}");
    }
}

/// A directory with links to the files of the bundled model, except `own`, which are copies.
fn checkpoint(name: &str, own: &[&str]) -> TempDir {
    let dir = TempDir::new(name);
    for file in std::fs::read_dir(model_dir()).unwrap() {
        let (from, name) = file.map(|file| (file.path(), file.file_name())).unwrap();
        let to = dir.0.join(&name);
        match own.contains(&name.to_str().unwrap()) {
            true => drop(std::fs::copy(from, to).unwrap()),
            false => std::os::unix::fs::symlink(from.canonicalize().unwrap(), to).unwrap(),
        }
    }
    dir
}

#[test]
fn weights_that_are_no_numbers_are_refused() {
    let dir = checkpoint("nan", &["model.safetensors"]);
    let path = dir.0.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let norm = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensor("model.norm.weight").unwrap();
    let at = norm.data().as_ptr() as usize - bytes.as_ptr() as usize;
    bytes[at..at + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let error = refused(pegainfer().args(["--port", "0", "--model-path", dir.0.to_str().unwrap()]));
    assert!(error.ends_with("its weights are damaged; download the checkpoint again"), "{error}");
}

#[test]
fn a_configuration_of_other_weights_is_told() {
    let dir = checkpoint("layers", &["config.json", "generation_config.json"]);
    let path = dir.0.to_str().unwrap();
    let edit = |file: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(dir.0.join(file)).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(dir.0.join(file), text.replace(from, to)).unwrap();
    };
    edit("config.json", "\"num_hidden_layers\": 6", "\"num_hidden_layers\": 5");
    let (code, _, stderr) = run(pegainfer().args(["generate", "x", "--max-tokens", "1", "--model-path", path]));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("config.json does not ask for model.layers.5."), "{stderr}");
    edit("generation_config.json", "4089", "99999");
    let error = refused(pegainfer().args(["--port", "0", "--model-path", path]));
    assert!(error.contains("eos_token_id 99999 is not below vocab_size 4096"), "{error}");
}

#[test]
fn sigterm_lets_open_requests_finish_and_exits_with_zero() {
    for signal in ["-TERM", "-INT"] {
        let mut server = Process::start(&mut pegainfer());
        let body = json!({"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": true, "stream": true});
        let mut open = read_head(post_unread(server.address, "/v1/completions", &body));
        assert!(open.chunk().is_some());
        server.signal(signal);
        let mut text = String::new();
        while let Some(chunk) = open.chunk() {
            text += &chunk;
        }
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
        let mut log = String::new();
        server.log.read_to_string(&mut log).unwrap();
        assert!(log.contains("stopping: 1 open requests have 30 s to finish"), "{log}");
    }
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let mut server = Process::start(&mut pegainfer());
    // An incomplete request would hold the first signal's drain.
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(b"POST /v1/completions HTTP/1.1\r\n").unwrap();
    post_ok(server.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    server.signal("-TERM");
    let mut log = String::new();
    while !log.contains("stopping") {
        assert!(server.log.read_line(&mut log).unwrap() > 0, "{log}");
    }
    assert_eq!(get(server.address, "/health").text(), "draining");
    server.signal("-TERM");
    assert_eq!(server.child.wait().unwrap().code(), Some(1));
    server.log.read_to_string(&mut log).unwrap();
    assert!(log.contains("second signal: exit without waiting"), "{log}");
}

#[test]
fn keys_come_from_a_file_and_are_in_no_log() {
    let dir = TempDir::new("keys");
    let path = dir.0.join("keys");
    std::fs::write(&path, "sk-from-file\n").unwrap();
    let flags = ["--api-key-file", path.to_str().unwrap(), "--api-key", "sk-flag", "--log-level", "trace"];
    let mut server = Process::start(pegainfer().args(flags));
    let body = json!({"prompt": "x", "max_tokens": 1});
    for (key, status) in [("sk-from-file", 200), ("sk-flag", 200), ("sk-wrong", 401)] {
        let response = post_with(server.address, "/v1/completions", ("Authorization", &format!("Bearer {key}")), &body);
        assert_eq!(response.status, status, "{key}");
    }
    server.signal("-TERM");
    let mut log = String::new();
    server.log.read_to_string(&mut log).unwrap();
    assert!(log.contains("completions") && !log.contains("sk-"), "{log}");
    std::fs::write(&path, "").unwrap();
    let error = refused(pegainfer().args(["--port", "0"]).args(flags));
    assert!(error.ends_with("has no key: put one on each line"), "{error}");
    let error = refused(pegainfer().args(["--port", "0", "--api-key", "sk secret"]));
    assert_eq!(error, "error: an API key must be one or more ASCII characters without spaces");
    let error = refused(pegainfer().args(["--port", "0", "--cors-allow-origin", "example.com"]));
    assert!(error.contains("example.com is not an origin such as https://chat.example.com"), "{error}");
}

#[test]
fn dummy_weights_need_no_safetensors() {
    let dir = TempDir::new("dummy");
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(model_dir().join(name), dir.0.join(name)).unwrap();
    }
    let flags = ["--load-format", "dummy", "--served-model-name", "d", "--model-path", dir.0.to_str().unwrap()];
    let server = Process::start(pegainfer().args(flags));
    let body = json!({"model": "d", "prompt": "x", "max_tokens": 3, "ignore_eos": true});
    assert_eq!(post_ok(server.address, "/v1/completions", &body)["usage"]["completion_tokens"], 3);
}

/// The files of the bundled checkpoint, for the test hub.
fn hub_files() -> BTreeMap<String, Vec<u8>> {
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    let read = |name: &str| std::fs::read(model_dir().join(name)).unwrap();
    let mut files: BTreeMap<_, _> = names.iter().map(|name| (name.to_string(), read(name))).collect();
    files.insert("README.md".into(), b"not needed".to_vec());
    files.insert("encoding/encoding_dsv4.py".into(), b"REASONING_EFFORT_MAX = ''".to_vec());
    files
}

fn generate_from(hub: &Hub, home: &Path) -> Command {
    let mut command = pegainfer();
    command.env("HF_ENDPOINT", format!("http://{}", hub.address)).env("HF_HOME", home);
    command.args(["generate", "The capital of France is", "--temperature", "0", "--model-path", "test/tiny"]);
    command
}

#[test]
fn a_checkpoint_is_fetched_from_the_hub_resumed_and_kept() {
    let home = TempDir::new("hub");
    let hub = Hub::start(hub_files());
    // More breaks than retries: the first start fails, and the second one resumes the download.
    let broken = ("model.safetensors".to_string(), 1 << 20, 6);
    hub.behaviour.lock().unwrap().break_off = Some(broken);
    let error = refused(generate_from(&hub, &home.0).env("HF_TOKEN", "secret"));
    assert!(error.contains("the download of model.safetensors of test/tiny failed"), "{error}");
    assert!(error.contains("start again to resume it"), "{error}");
    let (code, stdout, stderr) = run(generate_from(&hub, &home.0).env("HF_TOKEN", "secret"));
    assert_eq!((code, stdout.as_str()), (Some(0), " Paris.\n"), "{stderr}");

    let seen = hub.seen();
    assert!(seen.iter().all(|line| line.ends_with(" Bearer secret")), "{seen:?}");
    assert!(!seen.iter().any(|line| line.contains("README")), "only what is needed: {seen:?}");
    assert!(seen.iter().any(|line| line.contains("encoding/encoding_dsv4.py")), "{seen:?}");
    let starts: Vec<usize> = seen
        .iter()
        .filter(|line| line.contains("model.safetensors"))
        .map(|line| line.split(' ').nth(1).unwrap().parse().unwrap_or(0))
        .collect();
    assert!(starts.is_sorted() && starts.len() == 7 && starts[6] >= 5 << 20, "each try goes on: {starts:?}");

    // Offline, and without requesting files again.
    hub.behaviour.lock().unwrap().refuse = Some(503);
    let before = hub.seen().len();
    let (code, stdout, stderr) = run(&mut generate_from(&hub, &home.0));
    assert_eq!((code, stdout.as_str()), (Some(0), " Paris.\n"), "{stderr}");
    assert_eq!(hub.seen().len(), before + 1);
    assert!(stderr.contains("cannot be asked for test/tiny; the copy in"), "{stderr}");
}

#[test]
fn hub_refusals_are_one_clear_sentence() {
    let home = TempDir::new("hub-errors");
    let hub = Hub::start(hub_files());
    let endpoint = format!("http://{}", hub.address);
    let refuse = |status| hub.behaviour.lock().unwrap().refuse = Some(status);
    refuse(404);
    let expected = format!(
        "error: {endpoint} has no model test/tiny, or it is private and HF_TOKEN is missing; and there is no directory \
         test/tiny here"
    );
    assert_eq!(refused(&mut generate_from(&hub, &home.0)), expected);
    refuse(401);
    assert_eq!(refused(&mut generate_from(&hub, &home.0)), expected, "the hub's response without a token");
    let error = refused(generate_from(&hub, &home.0).env("HF_TOKEN", "wrong"));
    let expected = "refuses access to test/tiny (HTTP 401): set HF_TOKEN to a token that may read it";
    assert_eq!(error, format!("error: {endpoint} {expected}"));
    hub.behaviour.lock().unwrap().refuse = None;
    hub.behaviour.lock().unwrap().files.remove("model.safetensors");
    let expected = format!(
        "error: test/tiny on {endpoint} cannot be served: it has no model.safetensors, and safetensors or GGUF files are served"
    );
    assert_eq!(refused(&mut generate_from(&hub, &home.0)), expected);
    let mut offline = generate_from(&hub, &home.0);
    offline.env("HF_ENDPOINT", "http://127.0.0.1:9");
    let error = refused(&mut offline);
    assert!(error.starts_with("error: http://127.0.0.1:9 cannot be reached to fetch test/tiny: "), "{error}");
}
