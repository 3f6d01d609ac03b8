//! Vectors and scores over HTTP, with the weights of the bundled checkpoint laid out as Qwen3-Embedding's.

use crate::support::client::{get, post, post_ok};
use crate::support::{Setup, TestServer, model_dir};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Parser;
use pegainfer_models::args::{EngineArgs, TaskArg};
use pegainfer_models::engine;
use pegainfer_server::cli::Cli;
use pegainfer_testing::TempDir;
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;

const EMBEDDINGS: &str = "/v1/embeddings";
const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";
/// Largest error of a probability: weights and activations are bf16.
const SCORE_ERROR: f64 = 0.05;

/// Reference outputs in f32.
#[derive(Deserialize)]
struct Fixture {
    texts: Vec<Text>,
    rerank: Rerank,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    embedding: Vec<f64>,
    embedding_64: Vec<f64>,
}

#[derive(Deserialize)]
struct Rerank {
    sets: Vec<Set>,
}

#[derive(Deserialize)]
struct Set {
    query: String,
    instruction: String,
    documents: Vec<Document>,
    order: Vec<usize>,
}

#[derive(Deserialize)]
struct Document {
    document: String,
    ids: Vec<u32>,
    score: f64,
    embedding_cosine: f64,
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../fixtures/embeddings-qwen3-tiny.json")).unwrap()
}

/// Writes the weights without the prefix of their names and without an output matrix. `ends`: the tokenizer ends texts.
fn write_checkpoint(dir: &Path, ends: bool) {
    let bundled = model_dir();
    let weights = std::fs::read(bundled.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&weights).unwrap();
    let flat = tensors.iter().map(|(name, view)| (name.strip_prefix("model.").unwrap().to_owned(), view));
    std::fs::write(dir.join("model.safetensors"), safetensors::serialize(flat, None).unwrap()).unwrap();
    let read =
        |file: &str| -> Value { serde_json::from_str(&std::fs::read_to_string(bundled.join(file)).unwrap()).unwrap() };
    let mut config = read("config.json");
    (config["tie_word_embeddings"], config["eos_token_id"]) = (json!(false), json!(4087));
    let mut tokenizer = read("tokenizer.json");
    if ends {
        let end = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
        let text = |id: &str, of: u32| json!({"Sequence": {"id": id, "type_id": of}});
        tokenizer["post_processor"] = json!({"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            {"type": "TemplateProcessing", "single": [text("A", 0), end], "pair": [text("A", 0), text("B", 1), end],
             "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [4087], "tokens": ["<|endoftext|>"]}}},
        ]});
    }
    let modules = json!([{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]);
    for (file, content) in [("config.json", config), ("tokenizer.json", tokenizer), ("modules.json", modules)] {
        std::fs::write(dir.join(file), content.to_string()).unwrap();
    }
    std::fs::copy(bundled.join("tokenizer_config.json"), dir.join("tokenizer_config.json")).unwrap();
}

/// A server of the checkpoint at `dir` for a task.
fn server(dir: &Path, task: TaskArg, flags: &[&str]) -> TestServer {
    let path = dir.to_str().unwrap();
    let flags = [&["pegainfer", "--device", "cpu", "--threads", "2", "--model-path", path], flags].concat();
    let args: EngineArgs = Cli::parse_from(flags).serve.engine;
    let engine = engine::load(dir, &args).unwrap();
    TestServer::over(engine.handle, Setup { max_queued: 1024, model_dir: dir.to_owned(), task, ..Setup::default() })
}

fn embedder(ends: bool) -> (TempDir, TestServer) {
    let dir = TempDir::new("embedder");
    write_checkpoint(dir.path(), ends);
    let server = server(dir.path(), TaskArg::Auto, &[]);
    (dir, server)
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[track_caller]
fn is_close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    assert!(cosine(got, expected) > 0.9999, "cosine {}", cosine(got, expected));
    let length = got.iter().map(|x| x * x).sum::<f64>();
    assert!((length - 1.0).abs() < 1e-4, "length {length}");
}

#[test]
fn vectors_equal_the_reference() {
    let (Fixture { texts, .. }, (_dir, server)) = (fixture(), embedder(true));
    let inputs: Vec<&str> = texts.iter().map(|text| text.text.as_str()).collect();
    let answer = post_ok(server.address, EMBEDDINGS, &json!({"input": inputs, "model": "tiny"}));
    let tokens: usize = texts.iter().map(|text| text.ids.len()).sum();
    assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    for (i, text) in texts.iter().enumerate() {
        let embedding = &answer["data"][i];
        assert_eq!((&embedding["object"], &embedding["index"]), (&json!("embedding"), &json!(i)));
        is_close(&numbers(&embedding["embedding"]), &text.embedding);
        // Alone, as token ids, and in base64 it is the same bits.
        let alone = post_ok(server.address, EMBEDDINGS, &json!({"input": text.text, "encoding_format": "float"}));
        assert_eq!(alone["data"][0]["embedding"], embedding["embedding"], "{:?} alone", text.text);
        let ids = post_ok(server.address, EMBEDDINGS, &json!({"input": text.ids, "encoding_format": "base64"}));
        let bytes = STANDARD.decode(ids["data"][0]["embedding"].as_str().unwrap()).unwrap();
        let decoded: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let written: Vec<f32> = numbers(&embedding["embedding"]).into_iter().map(|value| value as f32).collect();
        assert_eq!(decoded, written, "{:?} as ids", text.text);
        let short = post_ok(server.address, EMBEDDINGS, &json!({"input": text.text, "dimensions": 64}));
        is_close(&numbers(&short["data"][0]["embedding"]), &text.embedding_64);
    }
}

#[test]
fn a_tokenizer_that_does_not_end_texts_is_helped() {
    let (Fixture { texts, .. }, (_dir, server)) = (fixture(), embedder(false));
    for text in &texts {
        let answer = post_ok(server.address, EMBEDDINGS, &json!({"input": text.text}));
        is_close(&numbers(&answer["data"][0]["embedding"]), &text.embedding);
        assert_eq!(answer["usage"]["prompt_tokens"], json!(text.ids.len()));
    }
}

/// Texts longer than a step, and many at once.
#[test]
fn chunks_and_neighbours_change_no_vector() {
    let dir = TempDir::new("embedder");
    write_checkpoint(dir.path(), true);
    let (whole, chunked) = (
        server(dir.path(), TaskArg::Embed, &[]),
        server(dir.path(), TaskArg::Embed, &["--max-num-batched-tokens", "24", "--max-num-seqs", "3"]),
    );
    let long = "The little dog ran to the big tree and found a red ball. ".repeat(12);
    let texts: Vec<String> = (0..70).map(|i| long[i * 7..].chars().take(30 + i * 5).collect()).collect();
    let [one, other] = [&whole, &chunked].map(|server| post_ok(server.address, EMBEDDINGS, &json!({"input": texts})));
    assert_eq!(one["data"].as_array().unwrap().len(), 70);
    for i in 0..70 {
        let [one, other] = [&one, &other].map(|answer| numbers(&answer["data"][i]["embedding"]));
        assert!(cosine(&one, &other) > 0.99999, "text {i}: {}", cosine(&one, &other));
    }
}

#[test]
fn documents_are_ranked_as_by_the_reference() {
    let Fixture { rerank, .. } = fixture();
    let server = server(&model_dir(), TaskArg::Rerank, &[]);
    for Set { query, instruction, documents, order } in rerank.sets {
        let texts: Vec<&str> = documents.iter().map(|document| document.document.as_str()).collect();
        let tokens: usize = documents.iter().map(|document| document.ids.len()).sum();
        let body = json!({"query": query, "documents": texts, "instruction": instruction});
        let answer = post_ok(server.address, RERANK, &body);
        assert_eq!(answer["usage"]["prompt_tokens"], json!(tokens), "{query}");
        let results = answer["results"].as_array().unwrap();
        let mut last = f64::INFINITY;
        for result in results {
            let (index, score) =
                (result["index"].as_u64().unwrap() as usize, result["relevance_score"].as_f64().unwrap());
            assert!((score - documents[index].score).abs() < SCORE_ERROR, "{query}: {score}");
            assert_eq!(result["document"]["text"], documents[index].document);
            assert!(score <= last, "best first");
            last = score;
        }
        // The order is the reference's wherever scores are further apart than the error.
        let place = |index: usize| results.iter().position(|result| result["index"] == json!(index)).unwrap();
        for pair in order.windows(2) {
            let apart = documents[pair[0]].score - documents[pair[1]].score;
            assert!(apart < 2.0 * SCORE_ERROR || place(pair[0]) < place(pair[1]), "{query}: {order:?}");
        }
        let scores =
            post_ok(server.address, SCORE, &json!({"text_1": query, "text_2": texts, "instruction": instruction}));
        for (i, document) in documents.iter().enumerate() {
            let score = scores["data"][i]["score"].as_f64().unwrap();
            assert!((score - document.score).abs() < SCORE_ERROR, "{query}: {score}");
        }
        let list = post_ok(server.address, "/rerank", &json!({"query": query, "texts": texts, "raw_scores": true}));
        assert!(list[0]["text"].is_null() && list.as_array().unwrap().len() == texts.len());
        let best = post_ok(server.address, "/v2/rerank", &json!({"query": query, "documents": texts, "top_n": 1}));
        assert_eq!((best["results"].as_array().unwrap().len(), best["results"][0].get("document")), (1, None));
    }
}

#[test]
fn scores_of_a_model_of_vectors_are_cosines() {
    let (Fixture { rerank, .. }, (_dir, server)) = (fixture(), embedder(true));
    for Set { query, documents, .. } in rerank.sets {
        let texts: Vec<&str> = documents.iter().map(|document| document.document.as_str()).collect();
        let scores = post_ok(server.address, SCORE, &json!({"queries": query, "items": texts}));
        for (i, document) in documents.iter().enumerate() {
            let score = scores["data"][i]["score"].as_f64().unwrap();
            assert!((score - document.embedding_cosine).abs() < 0.01, "{query}: {score}");
        }
    }
}

#[track_caller]
fn is_refused(server: &TestServer, path: &str, body: &Value, status: u16, words: &str) {
    let response = post(server.address, path, body);
    let (got, text) = (response.status, response.text());
    assert!(got == status && text.contains(words), "{path}, expected {status} {words}: {got} {text}");
}

#[test]
fn what_cannot_be_answered_is_refused_by_its_field() {
    let (_dir, embedder) = embedder(true);
    let long = "word ".repeat(6000);
    for (body, words) in [
        (json!({}), "input is missing"),
        (json!({"input": []}), "input is empty"),
        (json!({"input": vec![""; 2049]}), "input may hold at most 2048 prompts, got 2049"),
        (json!({"input": "a", "dimensions": 321}), "dimensions must be at most 320, got 321"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": [5000]}), "input"),
        (json!({"input": long}), "context"),
    ] {
        is_refused(&embedder, EMBEDDINGS, &body, 400, words);
    }
    let cut = post_ok(embedder.address, EMBEDDINGS, &json!({"input": long, "truncate_prompt_tokens": 100}));
    assert_eq!(cut["usage"]["prompt_tokens"], 100);
    is_refused(&embedder, "/v1/completions", &json!({"prompt": "a"}), 400, "makes vectors of texts");
    is_refused(&embedder, RERANK, &json!({"query": "a", "documents": ["b"]}), 400, "needs --task rerank");
    assert_eq!(get(embedder.address, "/v1/models").json()["data"][0]["task"], "embed");

    let writer = server(&model_dir(), TaskArg::Auto, &[]);
    is_refused(&writer, EMBEDDINGS, &json!({"input": "a"}), 400, "needs --task embed");
    let ranker = server(&model_dir(), TaskArg::Rerank, &["--max-model-len", "512"]);
    for (body, words) in [
        (json!({"documents": ["b"]}), "query is missing"),
        (json!({"query": "a"}), "documents"),
        (json!({"query": "a", "documents": []}), "send 1 to 1000 documents, got 0"),
        (json!({"query": "a", "documents": [1]}), "documents"),
        (json!({"query": "a", "documents": [{"title": "b"}]}), "text"),
        (json!({"query": "a", "documents": [long]}), "context"),
    ] {
        is_refused(&ranker, RERANK, &body, 400, words);
    }
    post_ok(ranker.address, RERANK, &json!({"query": "a", "documents": [{"text": "b"}, long], "truncate": true}));
    is_refused(&ranker, SCORE, &json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}), 400, "equally many");
    is_refused(&ranker, "/v1/chat/completions", &json!({"messages": []}), 400, "");
}
