//! Drafts from the text, and by the layer that drafts, with random weights. Drafts change no bit, those of the layer
//! equal an independent f64 implementation, and they do not depend on how the text before them was computed.

use crate::mtp_checkpoint::checkpoint;
use crate::oracle::{Mistake, Oracle};
use crate::stored;
use crate::support::derived::config;
use crate::support::invariance::{self, Alone};
use crate::support::speculation::{
    by_model, drafts_of_the_model_follow_a_grammar, few_tokens, lookup_drafts_change_no_token,
};
use crate::support::{
    LoadOptions, RANKS, THREE_PAGES, Target, best, cuda_graph, engine, fixture, greedy, growing, model_path, options,
    rank_counts, run,
};
use crate::verify_steps::{Plan, Sequences, verify};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::isa::Isa;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_deepseek_v4::Options;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan::{self, Step};
use pegainfer_deepseek_v4::sharing::Sharing;
use pegainfer_deepseek_v4::{DeepSeekEngine, DeepSeekV4};
use pegainfer_runtime::GraphReplays;

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

#[test]
fn drafts_change_no_bit() {
    let base = options(Numerics::REFERENCE);
    let mut requests = requests(&[1, 126, 127, 128, 129, 250], 24);
    requests.extend(growing(&text()));
    let alone = Alone::new(&mut engine(1, &base), best(), requests);
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), max_num_mixed_tokens: 40, ..base.clone() };
    let tight = LoadOptions { kv_cache_bytes: THREE_PAGES, ..mixed.clone() };
    alone.holds_with_drafts(|speculation| drafting(&mixed, speculation), |speculation| drafting(&tight, speculation));
}

#[test]
fn lookup_drafts_save_steps() {
    let base = options(Numerics::REFERENCE);
    lookup_drafts_change_no_token(None, |speculation| drafting(&base, speculation));
}

/// Slots are kept at the ends of pages, even if drafts would cross them.
#[test]
fn a_text_that_was_drafted_is_found_in_the_prefix_cache() {
    let (text, base) = (text(), options(Numerics::REFERENCE));
    let first = greedy(&text[..100], 180);
    let expected = run(&mut engine(1, &base), std::slice::from_ref(&first)).remove(0);
    let whole = [&text[..100], &expected.ids()].concat();
    let mut drafting = drafting(&base, crate::support::speculation::oracle(5, vec![whole.clone()]));
    let got = run(&mut drafting, &[first]).remove(0);
    assert_eq!(got.ids(), expected.ids());
    assert!(drafting.stats().speculation.accepted_tokens() > 100);
    let again = run(&mut drafting, &[greedy(&whole, 4)]).remove(0);
    assert_eq!(again.end.unwrap().1.cached_tokens, 256, "of 280 tokens");
    let cold = run(&mut engine(1, &base), &[greedy(&whole, 4)]).remove(0);
    assert_eq!(again.ids(), cold.ids());
}

#[test]
fn drafts_of_the_model_change_no_bit() {
    let checkpoint = checkpoint("bits");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let alone =
        Alone::new(&mut engine(1, &base), best(), few_tokens(requests(&[1, 3, 4, 126, 127, 128, 129, 250], 24)));
    // More requests than run at once, and as many.
    for (drafts, depth, count) in [(1, 2, 20), (5, 1, 10)] {
        let mut drafting = drafting(&base, by_model(drafts));
        drafting.set_depth(depth);
        alone.cycle(count).holds_with_drafts_of_the_model(&format!("{drafts} drafts, depth {depth}"), &mut drafting);
    }
    let growing = growing(&text());
    let alone = Alone::new(&mut engine(1, &base), best(), few_tokens([&growing[..], &growing[..]].concat()));
    let tight = LoadOptions { kv_cache_bytes: THREE_PAGES, max_num_batched_tokens: Some(64), ..base };
    let preemptions = alone.holds_with_drafts_of_the_model("few pages", &mut drafting(&tight, by_model(3)));
    assert!(preemptions > 0, "nothing was preempted");
}

/// Random weights of the layer are the same for every number of ranks; so are the drafts.
#[test]
fn ranks_draft_what_one_drafts() {
    let checkpoint = checkpoint("ranks");
    let base = LoadOptions {
        model_path: checkpoint.path(),
        speculation: by_model(3),
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
        assert_replayed(&mut engine, loaded, best() == Target::Cuda && cuda_graph());
    }
    assert!(counts[0].0 > 0 && counts.iter().all(|count| *count == counts[0]), "{counts:?}");
}

/// Checks whether an engine that has drafted and verified since `before` replayed CUDA graphs.
fn assert_replayed(engine: &mut DeepSeekEngine, before: GraphReplays, graphs: bool) {
    let of = |replays: GraphReplays| [replays.verify, replays.first_drafts, replays.next_drafts];
    let replays = engine.executor().graph_replays();
    let each = of(replays).into_iter().zip(of(before)).map(|(now, before)| now > before);
    assert_eq!(each.collect::<Vec<_>>(), [graphs; 3], "{replays:?}");
}

/// Steps of five sequences, padded to six, and of one sequence, that verify any number of drafts each. A GPU replays
/// graphs and gives the bits of the unpadded steps, launch by launch; a CPU gives them for the padded steps.
#[test]
fn graphs_of_steps_that_verify_and_draft_change_no_bit() {
    const ROUNDS: usize = 20;
    let checkpoint = checkpoint("graphs");
    let base = LoadOptions { model_path: checkpoint.path(), speculation: by_model(3), ..options(Numerics::REFERENCE) };
    let prompts: Vec<_> = (0..5).map(|i| text()[20 * i..][..126].to_vec()).collect();
    let plain = LoadOptions { speculation: None, ..base.clone() };
    let outputs = run(&mut engine(1, &plain), &prompts.iter().map(|text| greedy(text, 90)).collect::<Vec<_>>());
    let whole: Vec<_> = prompts.iter().zip(outputs).map(|(text, output)| [&text[..], &output.ids()].concat()).collect();
    for sequences in [5, 1] {
        let (mut padded, mut eager) = (engine(1, &base), engine(1, &LoadOptions { cuda_graph: false, ..base.clone() }));
        if best() != Target::Cuda {
            padded.executor().only_pad(16).unwrap();
        }
        let loaded = padded.executor().graph_replays();
        let mut run = |step: &Step| {
            let (outcome, expected) = (padded.executor().run(step).unwrap(), eager.executor().run(step).unwrap());
            assert_eq!((&outcome.tokens, &outcome.drafts), (&expected.tokens, &expected.drafts), "{step:?}");
            outcome
        };
        let mut state = Sequences::new(whole[..sequences].to_vec());
        for _ in 0..5 {
            run(&state.prompt_chunk());
        }
        let mut agreed = 0;
        for round in 0..ROUNDS {
            // Three drafts for each, or any number; every fifth step has none.
            let drafts = |b: usize| [3, (round + b) % 4, 3, (round + b) % 4, 0][round % 5];
            let plan = |b| Plan { drafts: drafts(b), right: (round + 2 * b) % 4, model_drafts: (round / 2 + b) % 4 };
            let plans: Vec<_> = (0..sequences).map(plan).collect();
            let outcome = run(&state.verify(&plans));
            agreed += state.accept(&plans, &outcome);
        }
        let least = if best() == Target::Cuda { ROUNDS * sequences / 2 } else { ROUNDS * sequences };
        assert!(agreed >= least, "{agreed} of {ROUNDS} steps of {sequences} sequences draw the text");
        assert_replayed(&mut padded, loaded, best() == Target::Cuda && cuda_graph());
        assert_replayed(&mut eager, GraphReplays::default(), false);
    }
}

#[test]
fn drafts_under_a_grammar_change_no_bit() {
    let checkpoint = checkpoint("grammar");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    let with = |speculation| drafting(&base, speculation);
    // Same bits on a GPU.
    drafts_of_the_model_follow_a_grammar(Target::Cpu(Isa::best()), requests(&[1, 4, 127, 129], 40), with);
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
fn drafts_are_those_of_the_model_in_f64() {
    let checkpoint = checkpoint("reference");
    let weights = stored::read(&checkpoint.path());
    for quantize in [false, true] {
        let numerics = if quantize { Numerics { quantize_kv: true, ..Numerics::F32 } } else { Numerics::F32 };
        let numerics = Numerics { quantize_activations: quantize, ..numerics };
        let base = LoadOptions { model_path: checkpoint.path(), ..options(numerics) };
        let mut engine = drafting(&base, by_model(4));
        let oracle = Oracle { weights: &weights, quantize, mistake: Mistake::None };
        for drafts in 1..=4 {
            let outcome = engine.executor().run(&prompt(&TOKENS, drafts)).unwrap();
            let logits = engine.executor().logits(1).unwrap();
            assert_eq!(outcome.drafts[0].len(), drafts);
            let known = [&TOKENS[..], &outcome.tokens, &outcome.drafts[0][..drafts - 1]].concat();
            let expected = oracle.draft_logits(&known, TOKENS.len());
            let largest = logits.iter().fold(f64::MIN, |most, logit| most.max(f64::from(*logit)));
            let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
            let off = logits
                .iter()
                .zip(&expected)
                .map(|(got, expected)| (f64::from(*got) - largest - sum.ln() - expected).abs());
            let off = off.fold(0.0, f64::max);
            println!("rounded: {quantize}, {drafts} drafts: off by {off:.2e}");
            // One value rounded differently changes all later ones.
            assert!(off < if quantize { 0.1 } else { 1e-3 }, "{drafts} drafts: off by {off}");
            let draft = outcome.drafts[0][drafts - 1] as usize;
            assert_eq!(f64::from(logits[draft]), largest, "the draft is not the most likely token");
        }
    }
}

#[test]
fn drafts_do_not_depend_on_how_the_text_was_computed() {
    let checkpoint = checkpoint("steps");
    let base = LoadOptions { model_path: checkpoint.path(), ..options(Numerics::REFERENCE) };
    // The text of greedy sampling.
    let (mut text, mut drafts) = (TOKENS.to_vec(), Vec::new());
    let mut whole = drafting(&base, by_model(3));
    for _ in 0..6 {
        let outcome = whole.executor().run(&prompt(&text, 3)).unwrap();
        text.extend(&outcome.tokens);
        drafts.push(outcome.drafts[0].clone());
    }
    let (n, mut steps) = (TOKENS.len(), drafting(&base, by_model(3)));
    let steps = steps.executor();
    // In two chunks, the first of which ends within the prompt.
    let mut chunk = prompt(&TOKENS[..9], 0);
    (chunk.rows[0].next, chunk.samples) = (Some(TOKENS[9]), Vec::new());
    assert_eq!(steps.run(&chunk).unwrap().drafts, [Vec::<u32>::new()]);
    assert_eq!(steps.run(&verify(&TOKENS[9..], 0, 9, 3)).unwrap().drafts[0], drafts[0]);
    // One of two drafts is accepted; then both of two are.
    let wrong = text[n + 2] ^ 1;
    let outcome = steps.run(&verify(&[text[n], text[n + 1], wrong], 2, n, 3)).unwrap();
    assert_eq!((&outcome.tokens[..2], &outcome.drafts[0]), (&text[n + 1..n + 3], &drafts[2]));
    let outcome = steps.run(&verify(&text[n + 2..n + 5], 2, n + 2, 3)).unwrap();
    assert_eq!((&outcome.tokens[..], &outcome.drafts[0]), (&text[n + 3..n + 6], &drafts[5]));
}

#[test]
fn a_checkpoint_without_the_layer_is_refused_and_dummy_weights_have_it() {
    let checkpoint = checkpoint("without");
    let error = |dir: &std::path::Path, dummy_seed| {
        let options = LoadOptions {
            model_path: dir.to_owned(),
            dummy_seed,
            speculation: by_model(2),
            ..options(Numerics::REFERENCE)
        };
        pegainfer_runtime::load::<DeepSeekV4>(vec![best().exec()], &options, &mut |_, _| {})
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let none = error(&model_path(), None).unwrap_err();
    assert!(none.starts_with("--speculative-config: config.json has no layers that draft"), "{none}");
    assert_eq!(error(&checkpoint.path(), Some(7)), Ok(()));
    std::fs::copy(model_path().join("model.safetensors"), checkpoint.path().join("model.safetensors")).unwrap();
    let missing = error(&checkpoint.path(), None).unwrap_err();
    assert!(missing.starts_with("--speculative-config: the checkpoint has no mtp.0.e_proj.weight"), "{missing}");
    let mut two = config(&checkpoint.path());
    two["num_nextn_predict_layers"] = 2.into();
    std::fs::write(checkpoint.path().join("config.json"), two.to_string()).unwrap();
    let two = error(&checkpoint.path(), Some(7)).unwrap_err();
    assert!(two.contains("drafts by 2 layers are not implemented"), "{two}");
}
