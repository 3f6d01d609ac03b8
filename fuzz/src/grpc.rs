//! Property of the gRPC services: any message gets an answer or a refusal with a sentence, never `INTERNAL`. A stream
//! carries the same output as the whole answer.

use crate::server::{Answer, call};
use prost::Message;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::generate_request::Prompt;
use vllm_proto::{
    AbortRequest, CandidateTokens, DecodingParameters, EngineReasoningGate, GenerateRequest, GenerateResponse,
    KvCacheParameters, KvHintAction, KvHintsEnvelope, LoadLoraRequest, MediaItem, RandomSampling, ResponseOptions,
    SequenceOutput, SleepRequest, StoppingCriteria, TokenIds, WakeUpRequest,
};

const GENERATE: &str = "/vllm.Inference/Generate";
const STREAM: &str = "/vllm.Inference/GenerateStream";
const PATHS: [&str; 12] = [
    GENERATE,
    STREAM,
    "/vllm.Control/Abort",
    "/vllm.Control/GetServerInfo",
    "/vllm.Control/GetModelInfo",
    "/vllm.Control/ListLoras",
    "/vllm.Control/LoadLora",
    "/vllm.Control/Sleep",
    "/vllm.Control/WakeUp",
    "/vllm.Control/IsSleeping",
    "/vllm.Control/IsPaused",
    "/grpc.health.v1.Health/Check",
];
/// gRPC's codes for failures of the server.
const UNKNOWN: i32 = 2;
const INTERNAL: i32 = 13;

/// Checks an input: the first byte selects the method, the rest is the message.
pub fn check(data: &[u8]) {
    let Some((&first, message)) = data.split_first() else { return };
    let path = PATHS[first as usize % PATHS.len()];
    let answer = call(path, message);
    let shown = || format!("{path} {message:02x?}: {answer:?}");
    assert!(answer.code != UNKNOWN && answer.code != INTERNAL, "{}", shown());
    if answer.code != 0 {
        assert!(!answer.error.is_empty() && answer.error.len() < 2000, "{}", shown());
        return;
    }
    if path == GENERATE {
        assert_eq!(answer.messages.len(), 1, "{}", shown());
        let streamed = call(STREAM, message);
        assert_eq!(streamed.code, 0, "{streamed:?} {}", shown());
        assert_eq!(summary(&answer), summary(&streamed), "{}", shown());
    }
}

/// The joined responses of one sequence.
fn summary(answer: &Answer) -> SequenceOutput {
    let responses = answer.messages.iter().map(|bytes| GenerateResponse::decode(&**bytes).expect("a response"));
    let mut sum = SequenceOutput::default();
    for output in responses.filter_map(|response| response.outputs) {
        assert!(sum.finish_info.is_none(), "a sequence ended twice: {answer:?}");
        sum.text += &output.text;
        sum.num_tokens += output.num_tokens;
        sum.token_ids.extend(output.token_ids);
        sum.logprobs.extend(output.logprobs);
        sum.ranks.extend(output.ranks);
        sum.candidate_tokens.extend(output.candidate_tokens);
        sum.finish_info = output.finish_info;
    }
    assert!(sum.finish_info.is_some(), "no end: {answer:?}");
    sum
}

/// The `n` most likely tokens.
fn top(n: u32) -> Option<CandidateTokens> {
    Some(CandidateTokens { select: Some(Select::TopN(n)) })
}

/// A call with every field that is taken.
fn with_every_field(prompt: Option<Prompt>) -> GenerateRequest {
    GenerateRequest {
        request_id: "call".into(),
        model: "qwen3-tiny".into(),
        prompt,
        temperature: Some(0.5),
        sampling: Some(RandomSampling {
            num_sequences: 1,
            top_k: Some(5),
            top_p: Some(0.5),
            min_p: Some(0.1),
            seed: Some(3),
        }),
        decoding: Some(DecodingParameters {
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            repetition_penalty: 1.5,
            logit_bias: [(5, 1.0), (6, -100.0)].into(),
            allowed_token_ids: vec![1, 2, 3, 4000],
            structured_output: None,
            bad_words_token_ids: vec![TokenIds { ids: vec![7, 8] }],
        }),
        stopping: Some(StoppingCriteria {
            max_new_tokens: 5,
            min_new_tokens: 1,
            stop_token_ids: vec![9],
            stop_strings: vec!["upon".into()],
            include_stop_strings: true,
            ignore_eos: true,
            thinking_token_budget: Some(-1),
        }),
        response: Some(ResponseOptions {
            prompt_token_ids: true,
            output_text: Some(true),
            output_token_ids: true,
            output_logprobs: true,
            output_candidates: top(2),
            skip_special_tokens: Some(false),
            ..Default::default()
        }),
        kv: Some(KvCacheParameters { bypass_prefix_cache: true, cache_salt: "s".into(), ..Default::default() }),
        truncate_prompt_tokens: 3,
        session_id: Some("s".into()),
        watermarking: Some(false),
        kv_hints: Some(KvHintsEnvelope { actions: vec![KvHintAction::default()], ..Default::default() }),
        engine_reasoning_gate: Some(EngineReasoningGate { reasoning_ended: Some(true), ..Default::default() }),
        ..Default::default()
    }
}

/// Messages with every field.
pub fn seeds() -> Vec<Vec<u8>> {
    let text = || Some(Prompt::Text("Once upon a time".into()));
    let ids = Some(Prompt::TokenIds(TokenIds { ids: vec![1, 300, 70, 4000] }));
    let all = with_every_field(ids.clone());
    let constrained = [
        StructuredOutput::Json(r#"{"type": "boolean"}"#.into()),
        StructuredOutput::Regex("[a-c]{3}".into()),
        StructuredOutput::Choice(StringChoices { choices: vec!["yes".into(), "no".into()] }),
        StructuredOutput::Grammar("start: \"ab\"".into()),
        StructuredOutput::JsonObject(true),
        StructuredOutput::StructuralTag("{}".into()),
    ];
    let constrained = constrained.map(|output| GenerateRequest {
        prompt: text(),
        decoding: Some(DecodingParameters { structured_output: Some(output), ..Default::default() }),
        ..Default::default()
    });
    let simple = GenerateRequest { prompt: text(), ..Default::default() };
    let sampling = Some(RandomSampling { num_sequences: 3, ..Default::default() });
    let several = GenerateRequest { prompt: ids, sampling, ..Default::default() };
    let media = GenerateRequest { media: vec![MediaItem::default()], lora_name: "a".into(), ..simple.clone() };
    let prompt_logprobs = GenerateRequest {
        response: Some(ResponseOptions { prompt_logprobs: true, prompt_candidates: top(1), ..Default::default() }),
        ..simple.clone()
    };
    let generate = [simple, all, several, media, prompt_logprobs].into_iter().chain(constrained);
    let generate = generate.flat_map(|request| [0, 1].map(|path| with(path, &request)));
    let control = [
        with(2, &AbortRequest { request_ids: vec!["call".into(), String::new()] }),
        with(3, &()),
        with(6, &LoadLoraRequest { lora_name: "a".into(), source_path: "../a".into() }),
        with(7, &SleepRequest { level: Some(1), mode: 2 }),
        with(8, &WakeUpRequest { tags: vec!["weights".into()] }),
        with(11, &AbortRequest { request_ids: vec!["vllm.Inference".into()] }),
    ];
    generate.chain(control).collect()
}

/// An input of the method with this number.
fn with(path: u8, message: &impl Message) -> Vec<u8> {
    let mut bytes = vec![path];
    message.encode(&mut bytes).expect("memory");
    bytes
}
