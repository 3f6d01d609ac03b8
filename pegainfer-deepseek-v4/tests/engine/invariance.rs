//! A request gives the same bits however it is scheduled: whole or in chunks, as prefill or token by token, alone or in
//! a batch, from a cold or a warm prefix cache, preempted or not. More ranks add in another order, so there the tokens
//! are the same and the logits equal up to f32 noise.

use crate::support::invariance::Alone;
use crate::support::{
    LoadOptions, Output, RANKS, THREE_PAGES, Target, best, cuda_graph, difference, engine, engine_with_threads,
    fixture, greedy, growing, log_softmax, logits, model_path, options, rank_counts, run,
};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::isa::Isa;
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_deepseek_v4::Options;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan::{self, NO_STATE, Segment};
use pegainfer_deepseek_v4::sharing::Sharing;

/// A text with more entries than the indexer chooses, and more than two entries of the heavy layer.
fn text() -> Vec<u32> {
    let long = fixture().cases.into_iter().find(|case| case.name == "long_stories").unwrap();
    long.prompt_ids[..330].to_vec()
}

/// Overlap, partial entries and window survive every boundary between steps. Chunks of 1 are decode. Two threads give
/// the bits of one.
#[test]
fn trap_05_chunks_and_decode_give_the_bits_of_the_whole() {
    let text = &text()[..270];
    for (numerics, chunks) in [(Numerics::REFERENCE, &[1, 3, 7, 33, 128, 160][..]), (Numerics::F32, &[7, 160])] {
        let whole = logits(&mut engine(1, &options(numerics)), text, 1024, 24);
        let mut engine = engine_with_threads(&options(numerics));
        for &chunk in chunks {
            let chunked = logits(&mut engine, text, chunk, 24);
            assert_eq!(difference(&whole, &chunked), 0.0, "{numerics:?}, chunks of {chunk}");
        }
    }
}

/// Prompts of lengths near the ends of a page, and of all lengths modulo 4 between them: the next tokens complete
/// entries or not, and leave a page or not.
#[test]
fn decode_goes_on_behind_prompts_of_every_length() {
    const DECODED: usize = 5;
    let text = &text()[..256 + DECODED];
    let mut engine = engine(1, &options(Numerics::REFERENCE));
    let whole = logits(&mut engine, text, 1024, text.len() - 128);
    let step = |from: (u32, usize), to: (u32, usize)| {
        let mut step = plan::uniform(1, to.1 - from.1, to.1);
        step.tokens = text[from.1..to.1].to_vec();
        let pages = 0..step.max_blocks() as u32;
        step.block_tables[0] = pages.map(|page| page + if page == 0 { 0 } else { to.0 * 4 }).collect();
        step.state[0] = Segment { from: if from.1 == 0 { NO_STATE } else { from.0 }, to: to.0, ..step.state[0] };
        step
    };
    engine.executor().run(&step((0, 0), (0, 128))).unwrap();
    let between = (137..248).step_by(7);
    for length in (129..137).chain(between).chain(248..=256) {
        // Continues from the state after the first page, in a separate slot and pages.
        engine.executor().run(&step((0, 128), (1, length))).unwrap();
        for end in length + 1..=length + DECODED {
            engine.executor().run(&step((1, end - 1), (1, end))).unwrap();
            let row = log_softmax(&engine.executor().logits(1).unwrap());
            assert_eq!(row, whole[end - 1 - 128], "a prompt of {length} tokens, token {end}");
        }
    }
}

/// Each step's tokens and state are the same bits on all ranks.
#[test]
fn two_and_four_ranks_agree_with_one() {
    let text = text();
    let cases = fixture().cases;
    let requests: Vec<_> = cases.iter().take(6).map(|case| greedy(&case.prompt_ids, 12)).collect();
    let mut alone = engine(1, &options(Numerics::F32));
    let (expected, tokens) = (logits(&mut alone, &text, 1024, 16), run(&mut alone, &requests));
    for ranks in rank_counts(RANKS) {
        // Even the steps of a small model are large enough for the ranks to share tokens and the indexer's scores.
        let checked = LoadOptions {
            check_ranks: true,
            model: Options { sharing: Sharing::ALWAYS, numerics: Numerics::F32 },
            ..options(Numerics::F32)
        };
        let mut shared = engine(ranks, &checked);
        let off = difference(&expected, &logits(&mut shared, &text, 150, 16));
        assert!(off < 1e-3, "{ranks} ranks: off by {off}");
        // A GPU captures the graph of six rows with five, and replays it with six.
        for count in [5, 6] {
            for (i, (alone, shared)) in tokens.iter().zip(run(&mut shared, &requests[..count])).enumerate() {
                assert_eq!(alone.ids(), shared.ids(), "{ranks} ranks, {}", cases[i].name);
            }
        }
    }
}

/// Ranks that each have the residual streams of some tokens give the same bits as ranks that have all of them, also for
/// odd numbers of tokens. If activations are rounded, a GPU uses other kernels for these tokens and for matrices as
/// small as those of this model.
#[test]
fn ranks_that_share_tokens_give_the_bits_of_ranks_that_do_not() {
    let text = &text()[..302];
    for numerics in [Numerics::F32, Numerics::REFERENCE] {
        if numerics.quantize_activations && best() == Target::Cuda {
            continue;
        }
        for ranks in rank_counts(RANKS) {
            let whole = Sharing { tokens: usize::MAX, ..Sharing::OFFICIAL };
            let [whole, shared] = [whole, Sharing::ALWAYS].map(|sharing| {
                let options =
                    LoadOptions { check_ranks: true, model: Options { sharing, numerics }, ..options(numerics) };
                logits(&mut engine(ranks, &options), text, 151, 16)
            });
            assert_eq!(difference(&whole, &shared), 0.0, "{numerics:?}, {ranks} ranks");
        }
    }
}

/// Experts wide enough to be cut by columns, and dummy weights that are the same for every number of ranks.
#[test]
fn ranks_that_share_experts_by_columns_agree_with_one() {
    let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-wide-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let config = std::fs::read_to_string(model_path().join("config.json")).unwrap();
    let wide = config.replace("\"moe_intermediate_size\": 128", "\"moe_intermediate_size\": 512");
    assert_ne!(config, wide);
    std::fs::write(dir.join("config.json"), wide).unwrap();
    let options = LoadOptions { model_path: dir.clone(), dummy_seed: Some(7), ..options(Numerics::F32) };
    let text = &text()[..140];
    let expected = logits(&mut engine(1, &options), text, 1024, 16);
    assert!(difference(&expected[..8], &expected[8..]) > 0.5, "all rows are alike: nothing is tested");
    for ranks in rank_counts(RANKS) {
        let off = difference(&expected, &logits(&mut engine(ranks, &options), text, 100, 16));
        assert!(off < 1e-3, "{ranks} ranks: off by {off}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Prompts of awkward lengths, some sampled, some with logits processors.
fn requests() -> Vec<GenerateRequest> {
    let cases = fixture().cases;
    let mut requests: Vec<_> = [1, 2, 6, 8].iter().map(|i| greedy(&cases[*i].prompt_ids, 8)).collect();
    let text = text();
    requests.extend([127, 128, 129, 250, 300].map(|length| greedy(&text[..length], 8)));
    for (i, request) in requests.iter_mut().enumerate() {
        if i % 2 == 1 {
            request.sampling = SamplingParams::new(0.9, 40, 0.95, 0.01, i as u64).unwrap();
        }
        if i % 3 == 1 {
            let fields = LogitsProcessorParams {
                repetition_penalty: 1.5,
                bad_words: vec![vec![13]],
                ..LogitsProcessorParams::default()
            };
            request.logits_processors = LogitsProcessors::new(fields, 4096).unwrap();
        }
    }
    requests
}

/// The result of each of `requests` alone.
fn alone(requests: Vec<GenerateRequest>) -> Alone {
    let mut engine = engine(1, &options(Numerics::REFERENCE));
    Alone::new(&mut engine, Target::Cpu(Isa::best()), requests)
}

/// Includes trap 14: a prefix from the cache includes its window.
#[test]
fn trap_14_bits_do_not_depend_on_scheduling_or_a_warm_cache() {
    let (alone, base) = (alone(requests()), options(Numerics::REFERENCE));
    let mut batched = engine(1, &base);
    let loaded = batched.executor().graph_replays().decode;
    alone.holds("batched", &mut batched);
    let before = batched.stats().prefix_hits;
    alone.holds("warm prefix cache", &mut batched);
    let hits = batched.stats().prefix_hits - before;
    assert_eq!(hits, 3 * 128 + 256, "prompts of 206, 129, 250 and 300 tokens were not found");
    alone.holds_without_logprobs("without log-probabilities", &mut batched);
    let graphs = best() == Target::Cuda && cuda_graph();
    let replays = batched.executor().graph_replays().decode - loaded;
    assert_eq!(replays > 0, graphs, "a GPU replays decode steps");

    let small = LoadOptions { max_num_batched_tokens: Some(48), ..base };
    alone.holds("mixed steps", &mut engine(1, &small));
}

/// Three pages for requests that come to need two each.
#[test]
fn preempted_requests_give_the_same_bits() {
    let alone = alone(growing(&text()).to_vec());
    let base = options(Numerics::REFERENCE);
    let tight = LoadOptions { kv_cache_bytes: THREE_PAGES, max_num_batched_tokens: Some(64), ..base };
    let mut preempting = engine(1, &tight);
    assert_eq!(preempting.limits().kv_blocks, 3);
    alone.holds("preemption", &mut preempting);
    let stats = preempting.stats();
    assert!(stats.preemptions > 0, "nothing was preempted");
    assert_eq!((stats.running, stats.kv_blocks_free), (0, 3));
}

/// A cancelled request leaves no trace and does not disturb its neighbour.
#[test]
fn cancelling_frees_everything_and_changes_nothing() {
    let (text, options) = (text(), options(Numerics::REFERENCE));
    let mut engine = engine(1, &options);
    let expected = run(&mut engine, &[greedy(&text[..40], 10)]).remove(0);
    engine.add(RequestId(100), greedy(&text, 50));
    engine.add(RequestId(101), greedy(&text[..40], 10));
    let (mut steps, mut tokens) = (0, Vec::new());
    while engine.has_work() {
        if engine.plan().is_none() {
            engine.finish().unwrap();
            continue;
        }
        engine.launch().unwrap();
        if steps == 3 {
            // While a step with it is in flight.
            engine.cancel(RequestId(100));
        }
        steps += 1;
        for (id, event) in engine.finish().unwrap() {
            assert!(steps <= 3 || id == RequestId(101), "an event of a cancelled request");
            if let (RequestId(101), TokenEvent::Token(token)) = (id, event) {
                tokens.push(token);
            }
        }
    }
    assert!(steps > 5);
    assert_eq!(expected.bits(), Output { tokens, ..Output::default() }.bits());
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, stats.kv_blocks_total));
}
