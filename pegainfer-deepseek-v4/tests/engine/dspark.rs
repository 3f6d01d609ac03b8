//! Drafts by DSpark's stages, with random weights. They change no bit, equal an independent f64 implementation of the
//! stages, and do not depend on how the text before them was computed.

use crate::dspark_checkpoint::{STAGES, checkpoint};
use crate::mtp_checkpoint;
use crate::oracle::{Mistake, Oracle};
use crate::stored;
use crate::support::invariance::{self, Alone};
use crate::support::speculation::{by, drafts_of_the_model_follow_a_grammar, few_tokens};
use crate::support::{
    LoadOptions, RANKS, THREE_PAGES, Target, best, cuda_graph, engine, fixture, greedy, growing, log_softmax,
    model_path, options, rank_counts, run,
};
use crate::verify_steps::{Plan, Sequences, verify};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::schedule::speculation::{ModelMethod, Speculation};
use pegainfer_deepseek_v4::Options;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan::{self, Step};
use pegainfer_deepseek_v4::sharing::Sharing;
use pegainfer_deepseek_v4::{DeepSeekEngine, DeepSeekV4, record, record_blocks};
use pegainfer_kernels::compare::{Case, compare};
use pegainfer_kernels::ops::HeadShape;

fn dspark(drafts: usize) -> Option<Speculation> {
    by(ModelMethod::DSpark, drafts)
}

/// An engine that drafts.
fn drafting(options: &LoadOptions, speculation: Option<Speculation>) -> DeepSeekEngine {
    engine(1, &LoadOptions { speculation, ..options.clone() })
}

fn text() -> Vec<u32> {
    fixture().cases.into_iter().find(|case| case.name == "long_stories").unwrap().prompt_ids
}

/// Prompts around the ends of pages, outputs across them.
fn requests(lengths: &[usize], max_tokens: usize) -> Vec<GenerateRequest> {
    invariance::requests(&fixture().cases[..2], lengths, max_tokens)
}

/// Prompts of every length up to that of a block, after which nothing is drafted; chunks, preemption, and a warm prefix
/// cache.
#[test]
fn blocks_change_no_bit() {
    let checkpoint = checkpoint("bits");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let lengths = [1, 3, 4, 5, 6, 127, 128, 129];
    let alone = Alone::new(&mut engine(1, &base), best(), few_tokens(requests(&lengths, 16)));
    // More requests than run at once, and as many.
    for (drafts, depth, count) in [(1, 2, 18), (5, 1, 10)] {
        let mut drafting = drafting(&base, dspark(drafts));
        drafting.set_depth(depth);
        alone.cycle(count).holds_with_drafts_of_the_model(&format!("{drafts} drafts, depth {depth}"), &mut drafting);
    }
    let chunked = LoadOptions { max_num_batched_tokens: Some(37), max_num_mixed_tokens: 20, ..base.clone() };
    alone.holds_with_drafts_of_the_model("chunks", &mut drafting(&chunked, dspark(4)));
    let growing = growing(&text());
    let alone = Alone::new(&mut engine(1, &base), best(), few_tokens([&growing[..], &growing[..]].concat()));
    let tight = LoadOptions { kv_cache_bytes: THREE_PAGES, max_num_batched_tokens: Some(64), ..base };
    let preemptions = alone.holds_with_drafts_of_the_model("few pages", &mut drafting(&tight, dspark(3)));
    assert!(preemptions > 0, "nothing was preempted");
}

/// Snapshots contain the stages' rings, so as many drafts are accepted after a cached prefix as after a computed one.
#[test]
fn a_cached_prefix_has_the_keys_of_the_stages() {
    let checkpoint = checkpoint("prefix");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let request = few_tokens(vec![greedy(&text()[..200], 60)]).remove(0);
    let mut engine = drafting(&base, dspark(5));
    let mut counts = Vec::new();
    for round in 0..2 {
        let before = engine.stats().speculation;
        let output = run(&mut engine, std::slice::from_ref(&request)).remove(0);
        let after = engine.stats().speculation;
        counts.push((after.draft_tokens - before.draft_tokens, after.accepted_tokens() - before.accepted_tokens()));
        assert_eq!(output.end.unwrap().1.cached_tokens, 128 * round);
    }
    assert!(counts[0].1 > 10 && counts[0] == counts[1], "{counts:?}");
}

/// Random weights of the stages are the same for every number of ranks; so are the drafts.
#[test]
fn ranks_draft_what_one_drafts() {
    let checkpoint = checkpoint("ranks");
    let base = LoadOptions {
        model_path: checkpoint.path(),
        speculation: dspark(4),
        check_ranks: true,
        model: Options { sharing: Sharing::ALWAYS, numerics: Numerics::F32 },
        ..options(Numerics::F32)
    };
    // The last prompt is so long that ranks share its tokens.
    let cases = fixture().cases;
    let long = cases.iter().filter(|case| case.prompt_ids.len() > 128).take(1);
    let requests: Vec<_> = cases.iter().take(4).chain(long).map(|case| greedy(&case.prompt_ids, 12)).collect();
    assert_eq!(requests.len(), 5);
    let plain = LoadOptions { speculation: None, ..base.clone() };
    let expected = run(&mut engine(1, &plain), &requests);
    let mut counts = Vec::new();
    for ranks in std::iter::once(1).chain(rank_counts(RANKS)) {
        let mut engine = engine(ranks, &base);
        let loaded = engine.executor().graph_replays();
        for (alone, shared) in expected.iter().zip(run(&mut engine, &requests)) {
            assert_eq!(alone.ids(), shared.ids(), "{ranks} ranks");
        }
        let stats = engine.stats().speculation;
        counts.push((stats.draft_tokens, stats.accepted_tokens()));
        let replays = engine.executor().graph_replays();
        let graphs = best() == Target::Cuda && cuda_graph();
        assert_eq!([replays.verify > loaded.verify, replays.blocks > loaded.blocks], [graphs; 2], "{replays:?}");
    }
    assert!(counts[0].0 > 0 && counts.iter().all(|count| *count == counts[0]), "{counts:?}");
}

/// Steps of five sequences, padded to six, and of one sequence, followed by any numbers of drafts. A GPU replays graphs
/// and gives the bits of the unpadded passes, launch by launch; a CPU gives them for the padded passes.
#[test]
fn graphs_of_blocks_change_no_bit() {
    const ROUNDS: usize = 20;
    let checkpoint = checkpoint("graphs");
    let base = LoadOptions { model_path: checkpoint.path(), speculation: dspark(4), ..options(Numerics::REFERENCE) };
    let prompts: Vec<_> = (0..5).map(|i| text()[20 * i..][..126].to_vec()).collect();
    let plain = LoadOptions { speculation: None, ..base.clone() };
    let outputs = run(&mut engine(1, &plain), &prompts.iter().map(|text| greedy(text, 90)).collect::<Vec<_>>());
    let whole: Vec<_> = prompts.iter().zip(outputs).map(|(text, output)| [&text[..], &output.ids()].concat()).collect();
    for sequences in [5, 1] {
        let (mut padded, mut eager) = (engine(1, &base), engine(1, &LoadOptions { cuda_graph: false, ..base.clone() }));
        if best() != Target::Cuda {
            padded.executor().only_pad(16).unwrap();
        }
        let mut run = |step: &Step| {
            let (outcome, expected) = (padded.executor().run(step).unwrap(), eager.executor().run(step).unwrap());
            assert_eq!((&outcome.tokens, &outcome.drafts), (&expected.tokens, &expected.drafts), "{step:?}");
            outcome
        };
        let mut state = Sequences::new(whole[..sequences].to_vec());
        for _ in 0..5 {
            run(&state.prompt_chunk());
        }
        for round in 0..ROUNDS {
            let drafts = |b: usize| [3, (round + b) % 4, 3, (round + b) % 4, 0][round % 5];
            let plan = |b| Plan { drafts: drafts(b), right: (round + 2 * b) % 4, model_drafts: (round / 2 + b) % 5 };
            let plans: Vec<_> = (0..sequences).map(plan).collect();
            let outcome = run(&state.verify(&plans));
            state.accept(&plans, &outcome);
        }
        let graphs = best() == Target::Cuda && cuda_graph();
        assert_eq!(padded.executor().graph_replays().blocks > 0, graphs);
        assert_eq!(eager.executor().graph_replays().blocks, 0);
    }
}

#[test]
fn blocks_under_a_grammar_change_no_bit() {
    let checkpoint = checkpoint("grammar");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let with = |speculation: Option<Speculation>| drafting(&base, speculation.and_then(|all| dspark(all.num_tokens)));
    // Same bits on a GPU.
    drafts_of_the_model_follow_a_grammar(Target::Cpu(Isa::best()), requests(&[1, 6, 127, 129], 40), with);
}

/// More sequences than one pass has blocks for: eight, with 40 batched tokens.
#[test]
fn more_blocks_than_a_pass_holds_are_drafted_in_several() {
    let checkpoint = checkpoint("passes");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let small = LoadOptions { max_num_batched_tokens: Some(40), ..base.clone() };
    let requests = few_tokens((0..12).map(|i| greedy(&text()[10 * i..][..20], 30)).collect());
    let alone = Alone::new(&mut engine(1, &base), best(), requests);
    alone.holds_with_drafts_of_the_model("12 blocks in passes of 8", &mut drafting(&small, dspark(2)));
}

#[test]
fn a_forced_acceptance_length_is_met() {
    let checkpoint = checkpoint("forced");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let forced = dspark(5).map(|all| Speculation { synthetic_acceptance_length: Some(3.5), ..all });
    let mut engine = drafting(&base, forced);
    run(&mut engine, &[greedy(&text()[..50], 200)]);
    let stats = engine.stats().speculation;
    let length = 1.0 + stats.accepted_tokens() as f64 / stats.drafts as f64;
    assert!((length - 3.5).abs() < 0.1, "{length}");
}

const TOKENS: [u32; 21] = [5, 900, 17, 17, 3000, 42, 8, 77, 1234, 5, 6, 7, 999, 2048, 31, 31, 31, 4000, 12, 650, 88];

/// A prompt in one step, after which the model drafts.
fn prompt(tokens: &[u32], model_drafts: usize) -> Step {
    let mut step = plan::uniform(1, tokens.len(), tokens.len());
    step.tokens = tokens.to_vec();
    step.rows[0].model_drafts = model_drafts;
    step
}

#[test]
fn blocks_are_those_of_the_model_in_f64() {
    let checkpoint = checkpoint("reference");
    let weights = stored::read(&checkpoint.path());
    let long = text()[..150].to_vec();
    for (quantize, tokens) in [(false, &TOKENS[..]), (false, &TOKENS[..5]), (true, &TOKENS[..]), (false, &long)] {
        let numerics = if quantize { Numerics { quantize_kv: true, ..Numerics::F32 } } else { Numerics::F32 };
        let numerics = Numerics { quantize_activations: quantize, ..numerics };
        // The logits of all positions can be read after a pass that was launched, not after a graph.
        let base = LoadOptions { model_path: checkpoint.path(), cuda_graph: false, ..options(numerics) };
        let mut engine = drafting(&base, dspark(5));
        let oracle = Oracle { weights: &weights, quantize, mistake: Mistake::None };
        for drafts in [5, 2] {
            let outcome = engine.executor().run(&prompt(tokens, drafts)).unwrap();
            let logits = engine.executor().logits(drafts).unwrap();
            assert_eq!(outcome.drafts[0].len(), drafts);
            let expected = oracle.block_logits(tokens, outcome.tokens[0], &outcome.drafts[0], &STAGES);
            let rows = logits.chunks(logits.len() / drafts);
            let off = |(got, expected): (&[f32], &Vec<f64>)| {
                let differences = log_softmax(got).into_iter().zip(expected).map(|(a, b)| (f64::from(a) - b).abs());
                differences.fold(0.0, f64::max)
            };
            let off: Vec<f64> = rows.clone().zip(&expected).map(off).collect();
            println!("rounded: {quantize}, {} tokens, {drafts} drafts: off by {off:?}", tokens.len());
            // One value rounded differently changes all later ones.
            let max = if quantize { 0.2 } else { 1e-3 };
            assert!(off.iter().all(|off| *off < max), "{drafts} drafts: off by {off:?}");
            for (draft, row) in outcome.drafts[0].iter().zip(rows) {
                let largest = row.iter().copied().fold(f32::MIN, f32::max);
                assert_eq!(row[*draft as usize], largest, "the draft is not the most likely token");
            }
        }
    }
}

#[test]
fn blocks_do_not_depend_on_how_the_text_was_computed() {
    let checkpoint = checkpoint("steps");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    // The text of greedy sampling.
    let (mut text, mut drafts) = (TOKENS.to_vec(), Vec::new());
    let mut whole = drafting(&base, dspark(5));
    for _ in 0..6 {
        let outcome = whole.executor().run(&prompt(&text, 5)).unwrap();
        text.extend(&outcome.tokens);
        drafts.push(outcome.drafts[0].clone());
    }
    let (n, mut steps) = (TOKENS.len(), drafting(&base, dspark(5)));
    let steps = steps.executor();
    // In two chunks, the first of which ends within the prompt.
    let mut chunk = prompt(&TOKENS[..9], 0);
    (chunk.rows[0].next, chunk.samples) = (Some(TOKENS[9]), Vec::new());
    assert_eq!(steps.run(&chunk).unwrap().drafts, [Vec::<u32>::new()]);
    assert_eq!(steps.run(&verify(&TOKENS[9..], 0, 9, 5)).unwrap().drafts[0], drafts[0]);
    // One of two drafts is accepted; then both of two are.
    let wrong = text[n + 2] ^ 1;
    let outcome = steps.run(&verify(&[text[n], text[n + 1], wrong], 2, n, 5)).unwrap();
    assert_eq!((&outcome.tokens[..2], &outcome.drafts[0]), (&text[n + 1..n + 3], &drafts[2]));
    let outcome = steps.run(&verify(&text[n + 2..n + 5], 2, n + 2, 5)).unwrap();
    assert_eq!((&outcome.tokens[..], &outcome.drafts[0]), (&text[n + 3..n + 6], &drafts[5]));
}

/// `pegainfer doctor` can compare all ops of a step with the stages and of a pass over blocks, with the operands of the
/// executor: two CPU devices agree on each.
#[test]
fn all_ops_can_be_compared() {
    let checkpoint = checkpoint("doctor");
    let config = Config { loads_drafts: true, ..Config::load(&checkpoint.path()).unwrap() };
    let cpu = || Exec::cpu(Isa::best(), Some(1)).unwrap();
    let mut compared = Vec::new();
    for (numerics, blocks, context) in [(Numerics::REFERENCE, 3, 301), (Numerics::F32, 3, 40), (Numerics::F32, 1, 3)] {
        let mut records = record(&config, numerics, 1, (blocks, 1, context)).unwrap();
        records.extend(record_blocks(&config, numerics, 1, (blocks, context)).unwrap());
        let shape = HeadShape { heads: 1, kv_heads: 1, head_dim: 128 };
        let case = Case { shape, context, rope_theta: config.rope_theta, exact_in_fp8: false };
        for record in &records {
            let found = compare(&mut cpu(), &mut cpu(), record, &case).unwrap();
            let found = found.unwrap_or_else(|| panic!("{record:?} cannot be compared"));
            assert!(found.ok() && found.absolute == 0.0, "{record:?}: {found:?}");
            compared.push((record.op, record.reads.len()));
        }
    }
    for op in [("mean_streams", 2), ("add", 2), ("sparse_attention", 10), ("pick_rows", 2)] {
        assert!(compared.contains(&op), "{op:?}");
    }
}

#[test]
fn what_a_checkpoint_cannot_do_is_refused_and_dummy_weights_have_the_stages() {
    let (checkpoint, april) = (checkpoint("without"), mtp_checkpoint::checkpoint("april"));
    let load = |dir: std::path::PathBuf, speculation, dummy_seed| {
        let options = LoadOptions { model_path: dir, dummy_seed, speculation, ..options(Numerics::REFERENCE) };
        pegainfer_runtime::load::<DeepSeekV4>(vec![best().exec()], &options, &mut |_, _| {})
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let error = |dir, speculation| load(dir, speculation, None).unwrap_err();
    let mtp = error(checkpoint.path(), by(ModelMethod::Mtp, 2));
    assert!(mtp.contains("drafts by DSpark: choose \"dspark\" instead of \"mtp\""), "{mtp}");
    let one_layer = error(april.path(), dspark(2));
    assert!(one_layer.contains("choose \"mtp\" instead of \"dspark\""), "{one_layer}");
    let none = error(model_path(), dspark(2));
    assert!(none.contains("config.json has no layers that draft"), "{none}");
    let long = error(checkpoint.path(), dspark(6));
    assert!(long.contains("\"num_speculative_tokens\" is 6; the checkpoint drafts 5 at most"), "{long}");
    assert_eq!(load(checkpoint.path(), dspark(5), None), Ok(()));
    assert_eq!(load(checkpoint.path(), None, None), Ok(()), "the stages stay in the file");
    assert_eq!(load(checkpoint.path(), dspark(5), Some(7)), Ok(()));
    std::fs::copy(model_path().join("model.safetensors"), checkpoint.path().join("model.safetensors")).unwrap();
    let missing = error(checkpoint.path(), dspark(5));
    assert!(missing.starts_with("--speculative-config: the checkpoint has no mtp.0.main_proj.weight"), "{missing}");
}
