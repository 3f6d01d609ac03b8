//! Adapters with reference outputs of PEFT in f32: alone, and in batches with other adapters and the model itself.

use crate::support::adapters::WithAdapter;
use crate::support::speculation::oracle_with_errors;
use crate::support::{
    ADAPTERS, BUNDLED, Case, Engine, Family, Fixture, Limits, Output, RANKS, Target, best, bundled_fixture,
    bundled_model, e2e, fixtures, greedy, options, rank_counts, run, with_logprobs,
};
use pegainfer_core::adapter::Adapter;
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_runtime::{AdapterLoader, LoadOptions, LoraOptions, load, uniform};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;

/// transformers and PEFT in bf16 change tokens at margins up to 0.073 nats, and log-probabilities of the top five by up to
/// 0.40.
const LIMITS: Limits = Limits { margin: 0.1, mean: 0.04, max: 0.45, close: 0.2 };

/// Sizes for all adapters of a test at once.
const LORA: LoraOptions = LoraOptions { max_loras: 3, max_rank: 16 };

fn with_slots() -> LoadOptions {
    LoadOptions { model_path: bundled_model(BUNDLED), lora: Some(LORA), ..options() }
}

/// An engine with slots for adapters, and a loader of these.
fn engine_with(ranks: usize, target: Target, options: &LoadOptions) -> (Engine, AdapterLoader) {
    let loaded = load::<Family>(target.execs(ranks), options, &mut |_, _| {}).unwrap();
    (loaded.engine, loaded.adapters.unwrap())
}

fn adapter(loader: &AdapterLoader, name: &str) -> Arc<Adapter> {
    loader.load(&fixtures().join("lora").join(name)).unwrap().adapter
}

fn reference(name: &str) -> Fixture {
    Fixture { limits: LIMITS, ..bundled_fixture(&format!("lora/{name}")) }
}

/// An engine whose requests all name one adapter.
fn engine_of(ranks: usize, target: Target, name: &str) -> WithAdapter<Engine> {
    let (engine, loader) = engine_with(ranks, target, &with_slots());
    let adapter = adapter(&loader, name);
    WithAdapter(engine, Some(adapter))
}

#[test]
fn every_step_of_an_adapter_agrees_with_the_reference() {
    let steps = |target: Target, case: &Case| if target == best() { case.top20.len() } else { 1 };
    for name in ADAPTERS {
        e2e::every_step_agrees(&reference(name), |target| engine_of(1, target, name), steps, 12);
    }
}

#[test]
fn greedy_text_of_an_adapter_equals_the_reference_up_to_its_first_close_call() {
    for name in ADAPTERS {
        e2e::greedy_text_equals_the_reference(&reference(name), |target| engine_of(1, target, name));
    }
}

#[test]
fn ranks_share_an_adapter() {
    for ranks in rank_counts(RANKS) {
        let name = ADAPTERS[ADAPTERS.len() - 1];
        e2e::greedy_text_equals_the_reference(&reference(name), |target| engine_of(ranks, target, name));
    }
}

/// Rows of one batch, each with its adapter.
#[derive(Deserialize)]
struct Mixed {
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    adapter: Option<String>,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    margins: Vec<f64>,
}

impl Row {
    fn request(&self, adapters: &HashMap<String, Arc<Adapter>>) -> GenerateRequest {
        let adapter = self.adapter.as_ref().map(|name| adapters[name].clone());
        with_logprobs(GenerateRequest { adapter, ..greedy(&self.prompt_ids, self.greedy_ids.len()) })
    }

    /// The text equals the reference up to its first close call.
    fn check(&self, output: &Output) -> usize {
        let decided = self.margins.iter().position(|margin| *margin <= LIMITS.margin).unwrap_or(self.margins.len());
        assert_eq!(output.ids()[..decided], self.greedy_ids[..decided], "{:?}", self.adapter);
        decided
    }
}

/// The mixed batch, and its requests for an engine with this loader.
fn mixed(loader: &AdapterLoader) -> (Vec<Row>, Vec<GenerateRequest>) {
    let Mixed { rows } = bundled_fixture("lora/mixed");
    let adapters: HashMap<_, _> = ADAPTERS.iter().map(|name| ((*name).to_owned(), adapter(loader, name))).collect();
    let requests = rows.iter().map(|row| row.request(&adapters)).collect();
    (rows, requests)
}

/// Tokens, and on the CPU the bits of all log-probabilities.
fn same(what: &str, expected: &[Output], got: &[Output]) {
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert!(best() == Target::Cuda || expected.bits() == got.bits(), "{what}: row {i}");
    }
}

#[test]
fn a_row_gives_the_same_in_a_batch_with_other_adapters_as_alone() {
    let (mut engine, loader) = engine_with(1, best(), &with_slots());
    let (rows, requests) = mixed(&loader);
    let together = run(&mut engine, &requests);
    let compared: usize = rows.iter().zip(&together).map(|(row, output)| row.check(output)).sum();
    assert!(compared > 100, "only {compared} tokens were compared");

    let mut reversed = run(&mut engine, &requests.iter().rev().cloned().collect::<Vec<_>>());
    reversed.reverse();
    same("in reverse order, from a warm cache", &together, &reversed);
    let alone: Vec<Output> =
        requests.iter().map(|request| run(&mut engine, std::slice::from_ref(request)).remove(0)).collect();
    same("alone", &together, &alone);

    let (mut padded, loader) = engine_with(1, best(), &with_slots());
    padded.executor().only_pad(32).unwrap();
    same("padded", &together, &run(&mut padded, &mixed(&loader).1));
    let small = LoadOptions { max_num_batched_tokens: Some(40), ..with_slots() };
    let (mut chunked, loader) = engine_with(1, best(), &small);
    chunked.set_depth(2);
    same("in chunks, with two steps in flight", &together, &run(&mut chunked, &mixed(&loader).1));
}

/// One slot for all: adapters take turns in it.
#[test]
fn adapters_take_turns_in_too_few_slots() {
    let (mut engine, loader) = engine_with(1, best(), &with_slots());
    let expected = run(&mut engine, &mixed(&loader).1);
    let one = LoadOptions { lora: Some(LoraOptions { max_loras: 1, ..LORA }), ..with_slots() };
    let (mut engine, loader) = engine_with(1, best(), &one);
    same("one slot", &expected, &run(&mut engine, &mixed(&loader).1));
}

#[test]
fn rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters() {
    let (mut engine, loader) = engine_with(1, best(), &with_slots());
    let (rows, requests) = mixed(&loader);
    let together = run(&mut engine, &requests);
    let plain = LoadOptions { lora: None, ..with_slots() };
    let mut plain = load::<Family>(best().execs(1), &plain, &mut |_, _| {}).unwrap();
    assert!(plain.adapters.is_none());
    let base = |i: &usize| rows[*i].adapter.is_none();
    let base: Vec<usize> = (0..rows.len()).filter(base).collect();
    assert!(!base.is_empty());
    let requests: Vec<_> = base.iter().map(|i| requests[*i].clone()).collect();
    let own: Vec<Output> = base.iter().map(|i| together[*i].clone()).collect();
    same("base rows", &run(&mut plain.engine, &requests), &own);
}

/// Slots cost nothing while no row uses them.
#[test]
fn a_step_without_adapters_runs_the_ops_of_an_engine_without_adapters() {
    let ops = |lora| {
        let loaded = load::<Family>(best().execs(1), &LoadOptions { lora, ..with_slots() }, &mut |_, _| {});
        let mut engine = loaded.unwrap().engine;
        let steps = [uniform::<Family>(2, 1, 40), uniform::<Family>(3, 20, 20)];
        let records = steps.map(|step| {
            let (outcome, records) = engine.executor().record(&step);
            outcome.unwrap();
            records.iter().map(|record| (record.op, record.kernel, record.operands(), record.bytes)).collect::<Vec<_>>()
        });
        assert!(records.iter().all(|records| !records.is_empty()));
        records
    };
    assert_eq!(ops(Some(LORA)), ops(None));
}

/// Drafts are verified with the adapter, wherever they come from.
#[test]
fn drafts_change_no_token_of_an_adapter() {
    let (mut engine, loader) = engine_with(1, best(), &with_slots());
    let (rows, requests) = mixed(&loader);
    let plain = run(&mut engine, &requests);
    let text = |(row, output): (&Row, &Output)| [row.prompt_ids.clone(), output.ids()].concat();
    let texts = rows.iter().zip(&plain).map(text).collect();
    let drafting = LoadOptions { speculation: oracle_with_errors(3, texts, 5), ..with_slots() };
    let (mut engine, loader) = engine_with(1, best(), &drafting);
    same("with drafts", &plain, &run(&mut engine, &mixed(&loader).1));
    let stats = engine.stats().speculation;
    assert!(stats.accepted_tokens() > 100 && stats.draft_tokens > stats.accepted_tokens());
}

/// An adapter that is loaded again has another number, and finds no prefix of the first.
#[test]
fn prefixes_belong_to_one_load_of_one_adapter() {
    let (mut engine, loader) = engine_with(1, best(), &with_slots());
    let prompt: Vec<u32> = (100..180).collect();
    let mut cached = |adapter: Option<Arc<Adapter>>| {
        let request = GenerateRequest { adapter, ..greedy(&prompt, 1) };
        let output = run(&mut engine, &[request]).remove(0);
        output.end.unwrap().1.cached_tokens
    };
    let first = adapter(&loader, ADAPTERS[0]);
    assert_eq!(cached(None), 0);
    assert!(cached(None) > 0);
    assert_eq!(cached(Some(first.clone())), 0, "those of the model itself");
    assert!(cached(Some(first)) > 0);
    assert_eq!(cached(Some(adapter(&loader, ADAPTERS[1]))), 0, "those of another adapter");
    assert_eq!(cached(Some(adapter(&loader, ADAPTERS[0]))), 0, "those of an earlier load");
    assert!(cached(None) > 0);
}
