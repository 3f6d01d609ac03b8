//! The recorded ops of a step: no weights, no memory.

use crate::support::model_path;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::record;

#[test]
fn every_layer_is_in_the_plan() {
    let config = Config::load(&model_path()).unwrap();
    let records = record(&config, Numerics::REFERENCE, 1, (2, 1, 300)).unwrap();
    let count = |op: &str| records.iter().filter(|record| record.op == op).count();
    for (op, expected) in [
        ("embed", 1),
        // One boundary between neighbouring blocks; none before the first block and after the last.
        ("hyper_mix", 1),
        ("hyper_merge_mix_norm", 9),
        ("hyper_merge", 1),
        ("sparse_attention", 5),
        ("attention_latents", 5),
        ("attention_queries", 5),
        ("select_entries", 2),
        ("route", 5),
        ("moe", 5),
        ("project", 5),
        ("sample", 1),
    ] {
        assert_eq!(count(op), expected, "{op}");
    }
    // A token reads only its own experts.
    let bytes: u64 = records.iter().map(|record| record.bytes).sum();
    assert!(records.iter().all(|record| record.sent == 0), "one rank sends nothing");
    assert!((4_000_000..18_000_000).contains(&bytes), "{bytes} bytes");
}

/// Two all-reduces of `[tokens, hidden]` bf16 per layer, one after the embedding, and an all-gather of the logits.
#[test]
fn a_rank_of_several_records_its_exchanges() {
    let config = Config::load(&model_path()).unwrap();
    let (hidden, vocab, layers, rows) = (256, 4096, 5, 2);
    // A rank sends to each other rank; short messages have a flag for each word, in a separate word.
    for (ranks, others) in [(2, 1), (4, 3)] {
        let records = record(&config, Numerics::REFERENCE, ranks, (rows, 1, 300)).unwrap();
        let of = |op: &str| records.iter().filter(|record| record.op == op).cloned().collect::<Vec<_>>();
        let (sums, gathers) = (of("all_reduce"), of("all_gather"));
        let part = (rows * hidden * 2) as u64;
        assert_eq!(sums.len(), 2 * layers + 1);
        for sum in &sums {
            assert_eq!((sum.bytes, sum.sent, sum.kernel), (2 * part, 2 * others * part, "low_latency"));
            assert_eq!((sum.reads[0].shape.as_slice(), sum.flops), (&[rows, hidden][..], others * part / 2));
        }
        let of_sums = 2 * others * 11 * part;
        let part = (rows * vocab / ranks * 4) as u64;
        assert_eq!(gathers.len(), 1);
        assert_eq!((gathers[0].bytes, gathers[0].sent), (part + ranks as u64 * part, others * part));
        let sent: u64 = records.iter().map(|record| record.sent).sum();
        assert_eq!(sent, of_sums + others * part);
        // The ops are those of the rank: its rows of the embedding and of the output matrix.
        assert_eq!(of("embed")[0].reads[1].shape, [vocab / ranks, hidden]);
        assert_eq!(gathers[0].reads[0].shape, [rows, vocab / ranks]);
    }
    let error = record(&config, Numerics::REFERENCE, 3, (1, 1, 300)).unwrap_err().to_string();
    assert!(error.contains("takes 1, 2, 4, 8 here"), "{error}");
}

/// In the step of a long prompt each rank has the residual streams of a part of the tokens. Partial sums travel to the
/// owners of their tokens, normalised tokens to all ranks, and after the last layer the streams to all ranks.
#[test]
fn ranks_share_the_tokens_of_prompts() {
    let config = Config::load(&model_path()).unwrap();
    let (tokens, hidden, layers) = (1022, 256, 5);
    // A quarter of the rows, the last two of which are no tokens.
    let own = (1024 / 4 * hidden) as u64;
    let records = record(&config, Numerics::REFERENCE, 4, (1, tokens, tokens)).unwrap();
    let of = |op: &str| records.iter().filter(|record| record.op == op).collect::<Vec<_>>();
    let (sums, gathers) = (of("reduce_scatter"), of("all_gather_rows"));
    assert_eq!((sums.len(), gathers.len()), (2 * layers, 2 * layers));
    assert!(sums.iter().all(|sum| (sum.sent, sum.flops) == (3 * own * 2, 3 * own)));
    let (streams, normed) = gathers.split_last().unwrap();
    assert!(normed.iter().all(|gather| gather.sent == 3 * own * 2));
    assert_eq!(streams.sent, 4 * 3 * own * 2);
    let boundaries = of("hyper_merge_mix_norm");
    assert!(boundaries.iter().all(|op| op.reads[0].shape == [tokens.div_ceil(4), 4, hidden]));
    // The embedding, of which a rank has some rows.
    assert_eq!(of("all_reduce").len(), 1);
}
