//! The exercise of docs/internals/adding-a-model.md: a model of two layers in one file is checked against an f32
//! reference, and served like the bundled models.

mod checkpoint;
mod model;
mod reference;
mod smollm2;

use crate::support::served::model_is_served;
use crate::support::{Setup, TestServer, model_dir};
use checkpoint::{Checkpoint, LAYERS};
use clap::Parser;
use model::Minimal;
use pegainfer_core::engine::{EngineHandle, GenerateRequest, TokenEvent, TokenLogprobs};
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_models::engine::family::Family;
use pegainfer_runtime::Overrides;
use pegainfer_server::cli::Cli;
use std::path::Path;

/// The family in the server's form.
static FAMILY: Family = Family::new::<Minimal>();

/// The checkpoint's engine on the CPU, with the flags of `pegainfer serve`.
fn load(checkpoint: &Checkpoint, flags: &[&str]) -> EngineHandle {
    load_on("cpu", &checkpoint.dir, flags)
}

/// The engine of the model at `path` on `device`.
fn load_on(device: &str, path: &Path, flags: &[&str]) -> EngineHandle {
    let args: EngineArgs = Cli::parse_from(["pegainfer", "--device", device].iter().chain(flags)).serve.engine;
    let device = engine::open_device(&FAMILY, path, &args).unwrap();
    (FAMILY.load)(device, path, &args).unwrap().handle
}

/// Log-probabilities of a prompt's tokens after the first, each with the 20 most likely ones.
fn prompt_logprobs(engine: &EngineHandle, prompt: &[u32]) -> Vec<TokenLogprobs> {
    let request = GenerateRequest { prompt_logprobs: Some(20), ..GenerateRequest::greedy(prompt.to_vec(), 1) };
    let mut stream = engine.submit(request).unwrap();
    loop {
        match stream.blocking_recv().unwrap() {
            TokenEvent::Prompt(logprobs) => return logprobs,
            TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error } => panic!("{error}"),
            _ => {}
        }
    }
}

/// Runs on the device in `PEGAINFER_TEST_DEVICE`, by default the CPU.
#[test]
fn the_forward_pass_is_the_reference_in_bf16() {
    let device = std::env::var("PEGAINFER_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
    let checkpoint = Checkpoint::write("reference", &model_dir());
    let prompt: Vec<u32> = (0..40).map(|i| (i * 997 + 13) % 4000).collect();
    let expected = reference::logprobs(&checkpoint.tensors, &prompt);
    // As a whole, and in chunks of 7 tokens, each of which attends to the cache written by earlier chunks.
    for flags in [&[][..], &["--max-num-batched-tokens", "7", "--max-num-seqs", "1"]] {
        let got = prompt_logprobs(&load_on(&device, &checkpoint.dir, flags), &prompt);
        assert_eq!(got.len(), prompt.len() - 1);
        let mut errors = Vec::new();
        for (i, got) in got.iter().enumerate() {
            errors.push((got.logprob - expected[i][prompt[i + 1] as usize]).abs());
            errors.extend(got.top.iter().map(|(id, logprob)| (logprob - expected[i][*id as usize]).abs()));
        }
        let (max, mean) =
            (errors.iter().copied().fold(0.0, f32::max), errors.iter().sum::<f32>() / errors.len() as f32);
        println!("log-probability error: mean {mean:.4}, max {max:.4} of {} values", errors.len());
        assert!(errors.len() > 700 && mean < 0.02 && max < 0.1, "mean {mean}, max {max}");
    }
}

#[test]
fn it_is_served_as_every_model() {
    let checkpoint = Checkpoint::write("served", &model_dir());
    let setup = Setup { model_dir: checkpoint.dir.clone(), ..Setup::default() };
    model_is_served(&TestServer::over(load(&checkpoint, &[]), setup));
}

#[test]
fn dummy_weights_and_the_plan_need_no_checkpoint_but_its_config() {
    let checkpoint = Checkpoint::write("plan", &model_dir());
    std::fs::remove_file(checkpoint.dir.join("model.safetensors")).unwrap();
    load(&checkpoint, &["--load-format", "dummy"]);
    let stored: usize = checkpoint.tensors.values().map(|(_, values)| 2 * values.len()).sum();
    assert_eq!((FAMILY.weight_bytes)(&checkpoint.dir, &Overrides::default()).unwrap(), stored as u64);
    let ops: Vec<&str> =
        (FAMILY.record)(&checkpoint.dir, &Overrides::default(), 1, (3, 1, 100)).unwrap().iter().map(|r| r.op).collect();
    let layer = ["linear", "rope_write_kv", "attention", "linear_add_norm", "linear_swiglu", "linear_add_norm"];
    assert_eq!(ops[..2], ["embedding", "rms_norm"]);
    assert_eq!(ops[2..2 + LAYERS * layer.len()], layer.repeat(LAYERS));
}

#[test]
fn unimplemented_settings_are_refused_by_name() {
    let checkpoint = Checkpoint::write("refused", &model_dir());
    let path = checkpoint.dir.join("config.json");
    let config = std::fs::read_to_string(&path).unwrap().replace("silu", "gelu");
    std::fs::write(&path, config).unwrap();
    let error = (FAMILY.vocab_size)(&checkpoint.dir).unwrap_err().to_string();
    assert!(error.contains("hidden_act = gelu") && error.contains("serves silu"), "{error}");
}
