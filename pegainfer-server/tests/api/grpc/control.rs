//! `vllm.Control`, and the health check.

use super::bundled;
use crate::support::grpc::Client;
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, model_dir};
use pegainfer_server::app::Options;
use tonic::Code;
use vllm_proto::{
    GetKvEventSourcesRequest, GetModelInfoRequest, GetServerInfoRequest, IsPausedRequest, IsSleepingRequest,
    LoadLoraRequest, SleepRequest, StartWeightUpdateRequest, UnloadLoraRequest, WakeUpRequest,
};

#[test]
fn the_server_describes_itself() {
    let (server, mut client) = bundled();
    let info = client.runtime.block_on(client.control.get_server_info(GetServerInfoRequest {})).unwrap().into_inner();
    let limits = server.engine.limits();
    assert_eq!(info.max_model_len as usize, limits.max_model_len);
    assert_eq!((info.kv_block_size as usize, info.total_kv_blocks as usize), (limits.block_size, limits.kv_blocks));
    assert_eq!(info.max_running_requests as usize, limits.max_num_seqs);
    assert_eq!((info.proto_version.as_str(), info.max_loras), (vllm_proto::VERSION, 0));
    let parallelism = info.parallelism.unwrap();
    assert_eq!((parallelism.data_parallel_size, parallelism.tensor_parallel_size, parallelism.world_size), (1, 1, 1));
    let again = client.runtime.block_on(client.control.get_server_info(GetServerInfoRequest {})).unwrap().into_inner();
    assert_eq!(info.instance_id, again.instance_id);

    let model = client.runtime.block_on(client.control.get_model_info(GetModelInfoRequest {})).unwrap().into_inner();
    // A sidecar reads the tokenizer from there.
    assert_eq!((model.model_id, model.served_model_name.as_str()), (model_dir().display().to_string(), "tiny"));
    assert!(model.supports_text_input && model.supports_token_ids_input && !model.supports_lora);

    let sources = client.runtime.block_on(client.control.get_kv_event_sources(GetKvEventSourcesRequest {})).unwrap();
    assert!(sources.into_inner().sources.is_empty());
    let sleeping = client.runtime.block_on(client.control.is_sleeping(IsSleepingRequest {})).unwrap();
    assert!(!sleeping.into_inner().sleeping);
}

#[test]
fn two_engines_are_two_ranks_of_data_parallelism() {
    let engines = (0..2).map(|_| MockEngine::replying(" a cat").0).collect();
    let server = TestServer::start_all(engines, Setup::default());
    let mut client = Client::connect(server.grpc);
    let info = client.runtime.block_on(client.control.get_server_info(GetServerInfoRequest {})).unwrap().into_inner();
    let parallelism = info.parallelism.unwrap();
    assert_eq!(
        (parallelism.data_parallel_size, parallelism.data_parallel_size_local, parallelism.world_size),
        (2, 2, 2)
    );
}

#[test]
fn what_is_not_served_says_so() {
    let (engine, _) = MockEngine::replying(" a cat");
    let server = TestServer::with(engine, Options { admin_local: true, ..Options::default() });
    let mut client = Client::connect(server.grpc);
    let (runtime, control) = (&client.runtime, &mut client.control);
    let paused = runtime.block_on(control.is_paused(IsPausedRequest {})).unwrap_err();
    assert_eq!(paused.code(), Code::Unimplemented);
    assert!(paused.message().contains("use Sleep and WakeUp"), "{paused}");
    let weights = runtime.block_on(control.start_weight_update(StartWeightUpdateRequest {})).unwrap_err();
    assert_eq!(weights.code(), Code::Unimplemented);
    let load = LoadLoraRequest { lora_name: "a".into(), source_path: "a".into() };
    let load = runtime.block_on(control.load_lora(load)).unwrap_err();
    assert_eq!(load.code(), Code::FailedPrecondition, "{load}");
    assert!(load.message().contains("--enable-lora"), "{load}");
    let unload = runtime.block_on(control.unload_lora(UnloadLoraRequest { lora_name: "a".into() })).unwrap_err();
    assert_eq!(unload.code(), Code::FailedPrecondition);
    let sleep = runtime.block_on(control.sleep(SleepRequest::default())).unwrap_err();
    assert_eq!(sleep.code(), Code::FailedPrecondition, "the only model is pinned: {sleep}");
    for request in [SleepRequest { level: Some(3), mode: 0 }, SleepRequest { level: None, mode: 1 }] {
        assert_eq!(runtime.block_on(control.sleep(request)).unwrap_err().code(), Code::InvalidArgument);
    }
    let tags = WakeUpRequest { tags: vec!["weights".into()] };
    assert_eq!(runtime.block_on(control.wake_up(tags)).unwrap_err().code(), Code::InvalidArgument);
    runtime.block_on(control.wake_up(WakeUpRequest::default())).unwrap();
}
