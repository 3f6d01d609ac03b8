//! vLLM's gRPC services, called by the client of the crate `vllm-proto`.

mod calls;
mod control;
mod limits;

use crate::support::client::post_ok;
use crate::support::grpc::{Client, ids, join, text};
use crate::support::{TestServer, tokenizer};
use serde_json::{Value, json};
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, RandomSampling, ResponseOptions, StoppingCriteria,
};

const PROMPT: &str = "Once upon a time";

/// The bundled model, and a client.
fn bundled() -> (TestServer, Client) {
    let server = TestServer::bundled();
    let client = Client::connect(server.grpc);
    (server, client)
}

/// The first choice of a completion.
fn completion(server: &TestServer, body: &Value) -> Value {
    post_ok(server.address, "/v1/completions", body)["choices"][0].clone()
}

fn token_ids(choice: &Value) -> Vec<u32> {
    choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn texts_and_ids_give_the_tokens_of_a_completion() {
    let (server, mut client) = bundled();
    let prompt = tokenizer().encode(PROMPT, true).unwrap();
    let body = json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 0,
        "return_token_ids": true});
    let expected = completion(&server, &body);
    for request in [text(PROMPT, 24), ids(&prompt, 24)] {
        let whole = client.generate(request.clone()).unwrap();
        let output = whole.outputs.unwrap();
        assert_eq!(
            (output.text.as_str(), &output.token_ids),
            (expected["text"].as_str().unwrap(), &token_ids(&expected))
        );
        assert_eq!((output.num_tokens, output.ranks), (24, vec![1; 24]), "greedy tokens are the most likely ones");
        let logprobs: Vec<f64> = output.logprobs.iter().map(|p| f64::from(*p)).collect();
        let of_completion = expected["logprobs"]["token_logprobs"].as_array().unwrap();
        let pairs = logprobs.iter().zip(of_completion.iter().map(|p| p.as_f64().unwrap()));
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6), "{logprobs:?} {of_completion:?}");
        let finish = output.finish_info.unwrap();
        assert_eq!(
            (finish.finish_reason(), finish.num_output_tokens, finish.stop_reason),
            (FinishReason::Length, 24, None)
        );
        assert_eq!(whole.prompt_info.unwrap().num_prompt_tokens as usize, prompt.len());

        let (prompt_tokens, sequences) = join(&client.stream(request).unwrap());
        let [sequence] = &sequences[..] else { panic!("{sequences:?}") };
        assert_eq!(prompt_tokens as usize, prompt.len());
        assert_eq!((&sequence.text, &sequence.ids), (&output.text, &output.token_ids));
        assert_eq!(sequence.logprobs, output.logprobs);
        assert_eq!(sequence.finish.as_ref().unwrap().finish_reason(), FinishReason::Length);
    }
    server.wait_idle();
}

#[test]
fn defaults_are_those_of_vllm() {
    let (_server, mut client) = bundled();
    let bare = GenerateRequest { stopping: None, response: None, temperature: None, ..text(PROMPT, 0) };
    let output = client.generate(bare).unwrap().outputs.unwrap();
    assert!(output.num_tokens <= 20 && output.token_ids.is_empty() && output.logprobs.is_empty());
    let options = ResponseOptions { output_text: Some(false), output_token_ids: true, ..Default::default() };
    let ids_only = GenerateRequest { response: Some(options), ..text(PROMPT, 4) };
    let output = client.generate(ids_only).unwrap().outputs.unwrap();
    assert_eq!((output.text.as_str(), output.token_ids.len()), ("", 4));
}

#[test]
fn stop_strings_and_tokens_end_a_sequence() {
    let (server, mut client) = bundled();
    let body =
        json!({"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
    let plain = completion(&server, &body);
    let (words, stop_id) = (plain["text"].as_str().unwrap(), token_ids(&plain)[5]);
    let word = words.split_whitespace().nth(3).unwrap().to_owned();
    for include_stop_strings in [false, true] {
        let stopping = StoppingCriteria {
            stop_strings: vec!["no such text".into(), word.clone()],
            include_stop_strings,
            ..text("", 12).stopping.unwrap()
        };
        let request = GenerateRequest { stopping: Some(stopping), ..text(PROMPT, 12) };
        let output = client.generate(request.clone()).unwrap().outputs.unwrap();
        let until = words.find(&word).unwrap() + if include_stop_strings { word.len() } else { 0 };
        assert_eq!(output.text, words[..until]);
        let finish = output.finish_info.unwrap();
        assert_eq!(finish.stop_reason, Some(StopReason::StopString(word.clone())));
        assert_eq!(join(&client.stream(request).unwrap()).1[0].text, words[..until]);
    }
    let stopping = StoppingCriteria { stop_token_ids: vec![stop_id], ..text("", 12).stopping.unwrap() };
    let output =
        client.generate(GenerateRequest { stopping: Some(stopping), ..text(PROMPT, 12) }).unwrap().outputs.unwrap();
    let finish = output.finish_info.unwrap();
    assert_eq!(
        (finish.finish_reason(), finish.stop_reason),
        (FinishReason::Stop, Some(StopReason::StopTokenId(stop_id)))
    );
    assert_eq!(output.token_ids.last(), Some(&stop_id));
}

#[test]
fn an_end_of_text_is_named() {
    let (server, _) = TestServer::replying(" a cat");
    let mut client = Client::connect(server.grpc);
    let mut request = text("x", 9);
    request.stopping.as_mut().unwrap().ignore_eos = false;
    let finish = client.generate(request).unwrap().outputs.unwrap().finish_info.unwrap();
    assert_eq!(finish.stop_reason, Some(StopReason::EosTokenId(crate::support::mock::EOS)));
    assert_eq!(finish.num_cached_tokens, Some(0));
}

#[test]
fn several_sequences_are_streamed_with_the_seeds_of_choices() {
    let (server, mut client) = bundled();
    let body = json!({"prompt": PROMPT, "max_tokens": 8, "temperature": 1, "seed": 7, "n": 3, "top_k": 0, "top_p": 1,
        "ignore_eos": true});
    let choices = post_ok(server.address, "/v1/completions", &body)["choices"].clone();
    let expected: Vec<&str> =
        choices.as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    let sampling = RandomSampling { num_sequences: 3, seed: Some(7), top_k: Some(0), top_p: Some(1.0), min_p: None };
    let request = GenerateRequest { temperature: Some(1.0), sampling: Some(sampling), ..text(PROMPT, 8) };
    let (_, sequences) = join(&client.stream(request.clone()).unwrap());
    assert_eq!(sequences.iter().map(|sequence| sequence.text.as_str()).collect::<Vec<_>>(), expected);
    assert!(sequences.iter().all(|sequence| sequence.finish.is_some()));
    let error = client.generate(request).unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
    assert!(error.message().contains("GenerateStream"), "{error}");
}

#[test]
fn candidates_and_the_prompt_are_reported() {
    let (server, mut client) = bundled();
    let body = json!({"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": true, "logprobs": 3,
        "prompt_logprobs": 2});
    let expected = completion(&server, &body);
    let top = |n| Some(CandidateTokens { select: Some(Select::TopN(n)) });
    let options = ResponseOptions {
        prompt_token_ids: true,
        prompt_logprobs: true,
        prompt_candidates: top(2),
        output_logprobs: true,
        output_candidates: top(3),
        ..Default::default()
    };
    let request = GenerateRequest { response: Some(options), ..text(PROMPT, 3) };
    let whole = client.generate(request.clone()).unwrap();
    let streamed = client.stream(request).unwrap();
    assert_eq!(whole.prompt_info, streamed[0].prompt_info);
    let (prompt, output) = (whole.prompt_info.unwrap(), whole.outputs.unwrap());
    assert_eq!(prompt.token_ids, tokenizer().encode(PROMPT, true).unwrap());
    let of_completion = expected["prompt_logprobs"].as_array().unwrap();
    for (i, expected) in of_completion.iter().enumerate().skip(1) {
        let own = &expected[prompt.token_ids[i].to_string()];
        assert!((own["logprob"].as_f64().unwrap() - f64::from(prompt.logprobs[i])).abs() < 1e-6, "{own} at {i}");
        assert_eq!(own["rank"], prompt.ranks[i]);
        assert!((1..=2).contains(&prompt.candidate_tokens[i].tokens.len()));
    }
    assert_eq!((prompt.logprobs[0], prompt.ranks[0], prompt.candidate_tokens[0].tokens.len()), (0.0, 0, 0));
    assert_eq!(output.candidate_tokens.len(), 3);
    for candidates in &output.candidate_tokens {
        let ranks: Vec<u32> = candidates.tokens.iter().map(|token| token.rank).collect();
        assert_eq!(ranks, [2, 3], "the first one is the token itself");
    }
}

#[test]
fn grammars_hold() {
    let (_server, mut client) = bundled();
    let mut constrained = |output: StructuredOutput| {
        let decoding = Some(DecodingParameters { structured_output: Some(output), ..Default::default() });
        let mut request = GenerateRequest { decoding, ..text(PROMPT, 24) };
        request.stopping.as_mut().unwrap().ignore_eos = false;
        client.generate(request).map(|response| response.outputs.unwrap().text)
    };
    let choices = StringChoices { choices: vec!["yes indeed".into(), "no".into()] };
    assert!(["yes indeed", "no"].contains(&&*constrained(StructuredOutput::Choice(choices)).unwrap()));
    let digits = constrained(StructuredOutput::Regex("[0-9]{4}".into())).unwrap();
    assert!(digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_digit()), "{digits}");
    let json = constrained(StructuredOutput::Json(r#"{"type": "boolean"}"#.into())).unwrap();
    assert!(["true", "false"].contains(&json.as_str()), "{json}");
    assert_eq!(constrained(StructuredOutput::Grammar("start: \"ab\"".into())).unwrap(), "ab");
    for bad in [StructuredOutput::Regex("(".into()), StructuredOutput::Json("5".into())] {
        assert_eq!(constrained(bad).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}

#[test]
fn biases_allowed_and_bad_tokens_hold() {
    let (_server, mut client) = bundled();
    let free = client.generate(text(PROMPT, 4)).unwrap().outputs.unwrap().token_ids;
    let mut decode = |decoding: DecodingParameters| {
        let request = GenerateRequest { decoding: Some(decoding), ..text(PROMPT, 4) };
        client.generate(request).unwrap().outputs.unwrap().token_ids
    };
    let biased = decode(DecodingParameters { logit_bias: [(100, 100.0)].into(), ..Default::default() });
    assert_eq!(biased, [100; 4]);
    let allowed = decode(DecodingParameters { allowed_token_ids: vec![7, 8], ..Default::default() });
    assert!(allowed.iter().all(|id| [7, 8].contains(id)), "{allowed:?}");
    let bad = vllm_proto::TokenIds { ids: free[..2].to_vec() };
    let other = decode(DecodingParameters { bad_words_token_ids: vec![bad], ..Default::default() });
    assert_eq!(other[0], free[0]);
    assert_ne!(other[1], free[1], "the sequence must not be completed");
}
