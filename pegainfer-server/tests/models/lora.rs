//! LoRA adapters over HTTP, with the bundled checkpoint.

use crate::support::client::{get, post, post_ok, post_with, send};
use crate::support::grpc::{Client, ids};
use crate::support::{Setup, TestServer, model_dir};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_server::adapters::Adapters;
use pegainfer_server::app::Options;
use pegainfer_server::cli::Cli;
use pegainfer_server::http::{ApiKeys, Secret};
use pegainfer_testing::TempDir;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tonic::Code;
use vllm_proto::{GenerateRequest, ListLorasRequest, LoadLoraRequest, UnloadLoraRequest};

const COMPLETIONS: &str = "/v1/completions";
const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-qwen3-4b/tests/fixtures/lora")
}

fn keys(keys: &[&str]) -> ApiKeys {
    let given: Vec<Secret> = keys.iter().map(|key| Secret((*key).to_owned())).collect();
    ApiKeys::load(&given, None).unwrap()
}

/// A server with the adapter qv-r4, which may load others of the fixtures. At most `in_memory` adapters stay in memory.
fn server(in_memory: usize, options: Options) -> TestServer {
    let flags = ["pegainfer", "--device", "cpu", "--threads", "2", "--enable-lora"];
    let args: EngineArgs = Cli::parse_from(flags).serve.engine;
    let mut engine = engine::load(&model_dir(), &args).unwrap();
    let loader = engine.adapters.take().unwrap();
    let adapters = Arc::new(Adapters::new(loader, args.max_loras.into(), in_memory, Some(fixtures())));
    adapters.load("qv-r4", &fixtures().join("qv-r4")).unwrap();
    let options = Options { adapters: Some(adapters), ..options };
    TestServer::over(engine.handle, Setup { max_queued: 1024, options, ..Setup::default() })
}

/// A server whose admin has the key `admin`; others need none.
fn open_server(in_memory: usize) -> TestServer {
    server(in_memory, Options { admin_keys: keys(&["admin"]), ..Options::default() })
}

fn as_admin(server: &TestServer, path: &str, body: &Value) -> (u16, String) {
    let response = post_with(server.address, path, ("Authorization", "Bearer admin"), body);
    (response.status, response.text())
}

/// The first greedy tokens of a case of the fixture `name`, and the text that the server gives for the same.
fn reference(name: &str) -> (Value, usize, Vec<u64>) {
    let text = std::fs::read_to_string(fixtures().join(format!("{name}.json"))).unwrap();
    let case = serde_json::from_str::<Value>(&text).unwrap()["cases"][0].clone();
    let margins = case["margins"].as_array().unwrap();
    let certain = margins.iter().take_while(|margin| margin.as_f64().unwrap() > 0.1).count();
    let ids = case["greedy_ids"].as_array().unwrap()[..certain].iter().map(|id| id.as_u64().unwrap()).collect();
    (case["prompt_ids"].clone(), certain, ids)
}

#[track_caller]
fn gives_the_reference(server: &TestServer, name: &str) {
    let (prompt, certain, ids) = reference(name);
    let body = json!({"model": name, "prompt": prompt, "max_tokens": certain, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    let answer = post_ok(server.address, COMPLETIONS, &body);
    assert_eq!((&answer["model"], &answer["choices"][0]["token_ids"]), (&json!(name), &json!(ids)));
}

#[test]
fn an_adapter_is_a_model() {
    let server = open_server(8);
    gives_the_reference(&server, "qv-r4");
    let models = get(server.address, "/v1/models").json();
    let [own, adapter] = &models["data"].as_array().unwrap()[..] else { panic!("{models}") };
    assert_eq!((&own["parent"], own.get("lora")), (&Value::Null, None));
    assert_eq!(
        (&adapter["id"], &adapter["parent"], &adapter["lora"]["rank"]),
        (&json!("qv-r4"), &own["id"], &json!(4))
    );
    assert_eq!(adapter["root"], fixtures().join("qv-r4").to_str().unwrap());
    assert_eq!(get(server.address, "/v1/models/qv-r4").json(), *adapter);

    let error = post(server.address, COMPLETIONS, &json!({"model": "qv-r5", "prompt": "a"}));
    assert_eq!(error.status, 404);
    let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("did you mean qv-r4?") && message.contains("this server has: "), "{message}");
    let metrics = get(server.address, "/metrics").text();
    assert!(metrics.contains("vllm:lora_requests_info{"), "{metrics}");
}

#[test]
fn grpc_names_and_loads_adapters() {
    let server = open_server(8);
    let (prompt, certain, expected) = reference("qv-r4");
    let prompt: Vec<u32> = serde_json::from_value(prompt).unwrap();
    let call = |lora_name: &str| GenerateRequest { lora_name: lora_name.into(), ..ids(&prompt, certain as u32) };
    let mut client = Client::with_key(server.grpc, "admin");
    let output = client.generate(call("qv-r4")).unwrap().outputs.unwrap();
    assert_eq!(output.token_ids.iter().map(|id| u64::from(*id)).collect::<Vec<_>>(), expected);
    assert_eq!(client.generate(call("rs-r8")).unwrap_err().code(), Code::NotFound);

    let load = client.call(LoadLoraRequest { lora_name: "rs-r8".into(), source_path: "rs-r8".into() });
    let loaded = client.runtime.block_on(client.control.load_lora(load)).unwrap().into_inner().adapter.unwrap();
    assert_eq!(
        (loaded.lora_name.as_str(), loaded.source_path),
        ("rs-r8", fixtures().join("rs-r8").canonicalize().unwrap().display().to_string())
    );
    client.generate(GenerateRequest { model: "tiny".into(), ..call("rs-r8") }).unwrap();
    let list = client.call(ListLorasRequest {});
    let adapters = client.runtime.block_on(client.control.list_loras(list)).unwrap().into_inner().adapters;
    let names: Vec<&str> = adapters.iter().map(|adapter| adapter.lora_name.as_str()).collect();
    assert_eq!((names, adapters[1].lora_id), (vec!["qv-r4", "rs-r8"], loaded.lora_id));
    let unload = || UnloadLoraRequest { lora_name: "rs-r8".into() };
    let (first, second) = (client.call(unload()), client.call(unload()));
    let unloaded = client.runtime.block_on(client.control.unload_lora(first)).unwrap().into_inner();
    assert_eq!(unloaded.adapter.unwrap().lora_id, loaded.lora_id);
    assert_eq!(client.runtime.block_on(client.control.unload_lora(second)).unwrap_err().code(), Code::NotFound);
    let outside = client.call(LoadLoraRequest { lora_name: "x".into(), source_path: "../lora".into() });
    assert_eq!(client.runtime.block_on(client.control.load_lora(outside)).unwrap_err().code(), Code::NotFound);
}

#[test]
fn adapters_come_and_go_while_the_server_runs() {
    let server = open_server(1);
    let load = json!({"lora_name": "rs-r8", "lora_path": "rs-r8"});
    assert_eq!(post(server.address, LOAD, &load).status, 403, "only admins");
    let loaded = as_admin(&server, LOAD, &load);
    assert_eq!(loaded, (200, "Success: LoRA adapter 'rs-r8' added successfully.".to_owned()));
    // One of them is in memory, in turn.
    for name in ["rs-r8", "qv-r4", "rs-r8"] {
        gives_the_reference(&server, name);
    }
    let (status, again) = as_admin(&server, LOAD, &load);
    assert!(status == 400 && again.contains("has already been loaded"), "{again}");
    let in_place = json!({"lora_name": "rs-r8", "lora_path": "rs-r8", "load_inplace": true});
    assert_eq!(as_admin(&server, LOAD, &in_place).0, 200);
    for (body, status, words) in [
        (json!({"lora_name": "x"}), 400, "must be provided"),
        (json!({"lora_name": "x", "lora_path": "/etc"}), 404, "--lora-root"),
        (json!({"lora_name": "x", "lora_path": "../lora"}), 404, "--lora-root"),
        (json!({"lora_name": "x", "lora_path": "missing"}), 404, "--lora-root"),
        (json!({"lora_name": "x", "lora_path": "refused/use-dora"}), 400, "use_dora"),
        (json!({"lora_name": "", "lora_path": "qv-r4"}), 400, "lora_name"),
    ] {
        let (got, message) = as_admin(&server, LOAD, &body);
        assert!(got == status && message.contains(words), "{body}: {got} {message}");
    }
    let unload = json!({"lora_name": "rs-r8"});
    let unloaded = as_admin(&server, UNLOAD, &unload);
    assert_eq!(unloaded, (200, "Success: LoRA adapter 'rs-r8' removed successfully.".to_owned()));
    assert_eq!(as_admin(&server, UNLOAD, &unload).0, 404);
    assert_eq!(post(server.address, COMPLETIONS, &json!({"model": "rs-r8", "prompt": "a"})).status, 404);
    gives_the_reference(&server, "qv-r4");
}

#[test]
fn a_key_may_be_limited_to_adapters() {
    let dir = TempDir::new("lora-keys");
    let path = dir.path().join("keys");
    std::fs::write(&path, "all\nsome adapters=qv-r4\nnone adapters=\n").unwrap();
    let api_keys = ApiKeys::load(&[], Some(&path)).unwrap();
    let server = server(8, Options { api_keys, ..Options::default() });
    for (key, status, listed) in [("all", 200, 2), ("some", 200, 2), ("none", 404, 1)] {
        let authorization = format!("Bearer {key}");
        let body = json!({"model": "qv-r4", "prompt": "a", "max_tokens": 1});
        assert_eq!(post_with(server.address, COMPLETIONS, ("Authorization", &authorization), &body).status, status);
        let models = send(server.address, "GET", "/v1/models", &[("Authorization", &authorization)], b"").json();
        assert_eq!(models["data"].as_array().unwrap().len(), listed, "{key}");
    }
}
