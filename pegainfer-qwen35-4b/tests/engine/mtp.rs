//! The layer that drafts (multi-token prediction), with random weights, next to the weights of the bundled checkpoint.
//! Drafts change no bit, equal those of a plain reference, and do not depend on how the text before them was computed.

use crate::mtp_support::{Checkpoint, Reference};
use crate::support::invariance::{self, Alone};
use crate::support::speculation::{by_model, drafts_of_the_model_follow_a_grammar, few_tokens};
use crate::support::{
    Fixture, MOE, Target, best, bundled_fixture, bundled_model, engine, engine_on, fixture, greedy, options,
    rank_counts, run,
};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_core::weights::Source;
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_qwen35_4b::plan::{NO_STATE, Segment, Step};
use pegainfer_runtime::{
    Bounds, Executor, LoadOptions, Model, ModelBytes, Overrides, StepSize, load, load_weights, ragged,
};

/// The usual requests, for which the layer of [`Checkpoint::repeating`] sometimes drafts the right token.
fn requests() -> Vec<GenerateRequest> {
    few_tokens(invariance::requests(&fixture().cases, &[1, 2, 3, 4, 15, 16, 17, 33, 64, 65, 130], 60))
}

#[test]
fn drafts_of_the_model_change_no_bit() {
    let checkpoint = Checkpoint::repeating("bits");
    let options = LoadOptions { model_path: checkpoint.path(), ..options() };
    let tight =
        LoadOptions { kv_cache_bytes: Some(48 * 16 * 3072), max_num_batched_tokens: Some(64), ..options.clone() };
    let with = |options: &LoadOptions, speculation| engine(best(), &LoadOptions { speculation, ..options.clone() });
    let alone = Alone::new(&mut with(&options, None), best(), requests());
    // Without the longest prompts, so that many run at once.
    let short = alone.skip(fixture().cases.len());
    for (drafts, depth, requests) in [(1, 2, &alone.cycle(32)), (6, 1, &short)] {
        let mut drafting = with(&options, by_model(drafts));
        drafting.set_depth(depth);
        requests.holds_with_drafts_of_the_model(&format!("{drafts} drafts, depth {depth}"), &mut drafting);
    }
    // Drafts that are taken from a quarter of the vocabulary.
    let part = by_model(3).map(|all| Speculation { draft_vocab_size: Some(1024), ..all });
    short.holds_with_drafts_of_the_model("a part of the vocabulary", &mut with(&options, part));
    let preemptions = short.holds_with_drafts_of_the_model("few blocks", &mut with(&tight, by_model(3)));
    assert!(preemptions > 0, "nothing was preempted");
}

/// The embedding and the hidden state go through columns of `mtp.fc` on each rank.
#[test]
fn drafts_of_the_model_on_two_ranks_change_no_bit() {
    let checkpoint = Checkpoint::repeating("ranks");
    let options = LoadOptions { model_path: checkpoint.path(), check_ranks: true, ..options() };
    for ranks in rank_counts(&[2]) {
        let with = |speculation| engine_on(ranks, best(), &LoadOptions { speculation, ..options.clone() });
        let alone = Alone::new(&mut with(None), best(), requests());
        alone.cycle(16).holds_with_drafts_of_the_model("two ranks", &mut with(by_model(3)));
    }
}

/// No request waits for the capture of a graph, of a decode step or of a draft pass.
#[test]
fn graphs_of_draft_passes_are_captured_at_start() {
    let checkpoint = Checkpoint::repeating("graphs");
    let mut engine = engine(
        best(),
        &LoadOptions { model_path: checkpoint.path(), speculation: by_model(3), cuda_graph: true, ..options() },
    );
    let captured = engine.executor().captured_graphs();
    assert_eq!(captured > 0, best() == Target::Cuda);
    assert_eq!(captured % 2, 0, "each size has a graph of the decode step and one of the draft pass");
    run(&mut engine, &requests());
    assert!(engine.stats().speculation.draft_tokens > 0);
    assert_eq!(engine.executor().captured_graphs(), captured);
}

#[test]
fn drafts_of_the_model_under_a_grammar_change_no_bit() {
    let checkpoint = Checkpoint::repeating("grammar");
    let options = LoadOptions { model_path: checkpoint.path(), ..options() };
    let with = |speculation| engine(best(), &LoadOptions { speculation, ..options.clone() });
    drafts_of_the_model_follow_a_grammar(best(), requests(), with);
}

/// An executor of the checkpoint with the layer that drafts, from the whole vocabulary or its first ids.
fn executor(checkpoint: &Checkpoint, draft_vocab_size: Option<usize>) -> Executor<Qwen35> {
    let mut exec = best().exec();
    let overrides = Overrides { mtp: true, ..Overrides::default() };
    let config = Qwen35::load_config_with(&checkpoint.path(), &overrides).unwrap();
    let source = Source::open(&checkpoint.path()).unwrap();
    let mut bytes = 0;
    let weights = load_weights::<Qwen35>(&mut exec, &config, &source, &mut |chunk| bytes += chunk).unwrap();
    assert_eq!(bytes, ModelBytes::of::<Qwen35>(&config).unwrap().weights);
    let size = StepSize { tokens: 64, rows: 4, samples: 16, context: 64 };
    Executor::on_one(exec, config, weights, &Bounds { draft_vocab_size, ..Bounds::exact(size, 4) }).unwrap()
}

/// A prompt in one step, after which the model drafts.
fn prompt(tokens: &[u32], model_drafts: usize) -> Step {
    let mut step = ragged::<Qwen35>(&[(tokens.len(), tokens.len())]);
    step.tokens = tokens.to_vec();
    step.rows[0].model_drafts = model_drafts;
    step
}

const TOKENS: [u32; 21] = [5, 900, 17, 17, 3000, 42, 8, 77, 1234, 5, 6, 7, 999, 2048, 31, 31, 31, 4000, 12, 650, 88];

#[test]
fn drafts_are_those_of_a_plain_reference() {
    // Without token mixers, the hidden state of a token is its embedding, so the reference computes only the last
    // layer.
    let checkpoint = Checkpoint::without_layers("reference");
    let mut executor = executor(&checkpoint, None);
    for drafts in 1..=4 {
        let outcome = executor.run(&prompt(&TOKENS, drafts)).unwrap();
        let got = executor.logits(1).unwrap();
        assert_eq!(outcome.drafts[0].len(), drafts);
        let known = [&TOKENS[..], &outcome.tokens, &outcome.drafts[0][..drafts - 1]].concat();
        let expected = Reference::new(&checkpoint).logits(&known, TOKENS.len());
        let scale = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        let error = got.iter().zip(&expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error < 0.03 * scale, "{drafts} drafts: {error} of {scale}");
        let best = |logits: &[f32]| logits.iter().fold(f32::MIN, |most, logit| most.max(*logit));
        let draft = outcome.drafts[0][drafts - 1] as usize;
        assert_eq!(got[draft], best(&got), "the draft is not the most likely token");
        assert!(expected[draft] > best(&expected) - 2.0 * error, "{drafts} drafts");
    }
}

#[test]
fn a_draft_is_the_most_likely_of_the_ids_that_are_asked_for() {
    const IDS: usize = 512;
    let checkpoint = Checkpoint::without_layers("part");
    let (mut whole, mut part) = (executor(&checkpoint, None), executor(&checkpoint, Some(IDS)));
    let mut others = 0;
    for end in 1..=TOKENS.len() {
        let step = prompt(&TOKENS[..end], 1);
        let draft = whole.run(&step).unwrap().drafts[0][0] as usize;
        let logits = whole.logits(1).unwrap();
        let outcome = part.run(&step).unwrap();
        let best = (0..IDS).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        assert_eq!((outcome.drafts.len(), outcome.drafts[0][0] as usize), (1, best), "{end} tokens");
        others += usize::from(draft >= IDS);
    }
    assert!(others > TOKENS.len() / 2, "{others} drafts were other ids");
    // Further passes begin with the drafts of the passes before.
    let outcome = part.run(&prompt(&TOKENS, 4)).unwrap();
    assert!(outcome.drafts[0].len() == 4 && outcome.drafts[0].iter().all(|draft| (*draft as usize) < IDS));
}

/// Tokens that a step verifies, the last `drafts` of them drafts, after `before` tokens whose state is in slot 0.
fn verify(tokens: &[u32], drafts: usize, before: usize, model_drafts: usize) -> Step {
    let mut step = ragged::<Qwen35>(&[(tokens.len(), before + tokens.len())]);
    let known = (tokens.len() - drafts) as u32;
    step.tokens = tokens.to_vec();
    (step.rows[0].drafts, step.rows[0].model_drafts) = (drafts, model_drafts);
    let sample = step.samples[0].clone();
    step.samples = (known - 1..tokens.len() as u32).map(|token| SampleRow { token, ..sample.clone() }).collect();
    step.state = vec![
        Segment { first: 0, end: known, from: 0, to: 0 },
        Segment { first: known, end: tokens.len() as u32, from: 0, to: NO_STATE },
    ];
    step
}

#[test]
fn drafts_do_not_depend_on_how_the_text_was_computed() {
    if best() == Target::Cuda {
        return;
    }
    let checkpoint = Checkpoint::repeating("steps");
    // The text of greedy sampling.
    let mut text = TOKENS.to_vec();
    let mut whole = executor(&checkpoint, None);
    let mut drafts = Vec::new();
    for _ in 0..6 {
        let outcome = whole.run(&prompt(&text, 3)).unwrap();
        text.extend(&outcome.tokens);
        drafts.push(outcome.drafts[0].clone());
    }
    let (n, mut steps) = (TOKENS.len(), executor(&checkpoint, None));
    // In two chunks, the first of which ends within the prompt.
    let mut chunk = prompt(&TOKENS[..9], 0);
    (chunk.rows[0].next, chunk.samples) = (Some(TOKENS[9]), Vec::new());
    assert_eq!(steps.run(&chunk).unwrap().drafts, [Vec::<u32>::new()]);
    let mut chunk = verify(&TOKENS[9..], 0, 9, 3);
    chunk.state.truncate(1);
    assert_eq!(steps.run(&chunk).unwrap().drafts[0], drafts[0]);
    // One of two drafts is accepted, then computed again with two more that are both accepted.
    let wrong = text[n + 2] ^ 1;
    let outcome = steps.run(&verify(&[text[n], text[n + 1], wrong], 2, n, 3)).unwrap();
    assert_eq!((&outcome.tokens[..2], &outcome.drafts[0]), (&text[n + 1..n + 3], &drafts[2]));
    let outcome = steps.run(&verify(&text[n + 1..n + 5], 2, n + 1, 3)).unwrap();
    assert_eq!((&outcome.tokens[..], &outcome.drafts[0]), (&text[n + 3..n + 6], &drafts[5]));
}

#[test]
fn a_checkpoint_without_the_layer_is_refused_and_dummy_weights_have_it() {
    let load = |dummy_seed| {
        let options = LoadOptions { dummy_seed, speculation: by_model(2), ..options() };
        load::<Qwen35>(vec![best().exec()], &options, &mut |_, _| {})
    };
    let error = load(None).unwrap_err().to_string();
    assert!(error.starts_with("--speculative-config: the checkpoint has no mtp.layers.* tensors"), "{error}");
    let loaded = load(Some(7)).unwrap();
    assert!(loaded.config.mtp);
}

/// Accepted drafts of a text in the reference, see tests/fixtures/README.md.
#[derive(serde::Deserialize)]
struct Accepted {
    cases: Vec<AcceptedOfText>,
}

#[derive(serde::Deserialize)]
struct AcceptedOfText {
    accepted: usize,
}

/// The layer of a model with experts was trained: its drafts are right as often as the reference's.
#[test]
fn drafts_by_experts_are_those_of_the_reference() {
    let name = MOE[0];
    let expected: Accepted = bundled_fixture(&format!("{name}.mtp"));
    let expected: usize = expected.cases.iter().map(|case| case.accepted).sum();
    let options = LoadOptions { model_path: bundled_model(name), ..options() };
    let drafts = LoadOptions { speculation: by_model(1), ..options.clone() };
    let cases = Fixture::bundled(name).cases;
    let requests: Vec<_> = cases.iter().map(|case| greedy(&case.prompt_ids, case.greedy_ids.len())).collect();
    let alone = Alone::new(&mut engine(best(), &options), best(), requests);
    let mut drafting = engine(best(), &drafts);
    alone.holds("drafts by experts", &mut drafting);
    let speculation = drafting.stats().speculation;
    let (accepted, drafted) = (speculation.accepted_tokens() as f64, speculation.draft_tokens as f64);
    // An accepted draft saves the step whose draft the reference counts, too.
    let share = expected as f64 / cases.iter().map(|case| case.greedy_ids.len()).sum::<usize>() as f64;
    println!("{accepted} of {drafted} drafts, {share:.2} in the reference");
    assert!(drafted > 100.0 && (accepted / drafted - share).abs() < 0.1, "{accepted} of {drafted}, expected {share}");
}
