//! Log-probabilities of sampled tokens and of the most likely ones.

use super::check::Check;
use crate::choice::{self, sample_cluster};
use crate::cpu::sampling;
use crate::cuda;
use crate::draw::{DRAW_WORDS, Draw};
use pegainfer_core::engine::{MAX_LOGPROBS, TokenLogprobs};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::team;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Words of a row's report: the log-probability's bits, the rank, then id and bits of each of the most likely tokens.
pub const REPORT_WORDS: usize = crate::limits::sampling::REPORT_WORDS;

/// Marks an empty place of a report: the row has no more tokens with a probability.
const NO_TOKEN: u32 = u32::MAX;

/// Log-softmax of raw logits (before temperature and truncation) at the sampled token and at the best ones, best first,
/// lower ids first on ties; and the rank of the sampled token, 1 + the number of larger logits.
///
/// `logits`: `[rows, vocab]` f32; `draws`: `[rows, DRAW_WORDS]` u32, with the requested number in `logprobs`;
/// `sampled`: `[rows]` u32; `out`: `[rows, REPORT_WORDS]` u32, for [`token_logprobs`]. Rows without a request, and
/// places after the last requested one, stay unchanged. Does not wait for a GPU.
pub fn logprobs(
    exec: &mut Exec,
    logits: &Tensor,
    draws: &Tensor,
    sampled: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("logprobs");
    let (rows, vocab) = logits.rows_cols();
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(draws, DType::U32, &[rows, DRAW_WORDS])?;
    check.is(sampled, DType::U32, &[rows])?;
    check.is(out, DType::U32, &[rows, REPORT_WORDS])?;
    let cluster = choice::gpu(exec)?.map(|gpu| sample_cluster(&gpu, rows));
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "logprobs" } else { "rows" };
        OpRecord::new("logprobs", kernel, &[logits, draws, sampled], &[out], 3 * logits.elements() as u64)
    });
    match (exec.device(), cluster) {
        (Device::Cpu(_), _) => {
            let (tokens, draws) = (sampled.host::<u32>(), draws.host::<u32>().as_chunks::<DRAW_WORDS>().0);
            check.that(tokens.iter().all(|&token| (token as usize) < vocab), "a token is not in the vocabulary")?;
            let logits = logits.host::<f32>();
            team::for_each_chunk(out.host_mut::<u32>(), REPORT_WORDS, |i, report| {
                if let Some(top) = Draw::from_words(&draws[i]).logprobs {
                    fill(report, &logits[i * vocab..][..vocab], tokens[i], top.min(MAX_LOGPROBS));
                }
            });
        }
        (Device::Cuda, Some(blocks)) => cuda::logprobs(exec, blocks, logits, draws, sampled, out)?,
        _ => {}
    }
    Ok(())
}

/// One row's report on the CPU.
fn fill(report: &mut [u32], row: &[f32], token: u32, top: usize) {
    let (logprob, rank, best) = sampling::logprobs_row(row, token, top);
    report[..2].copy_from_slice(&[logprob.to_bits(), rank]);
    let best = best.into_iter().map(|(id, logprob)| [id, logprob.to_bits()]);
    let places = report[2..].as_chunks_mut::<2>().0.iter_mut().take(top);
    places.zip(best.chain(std::iter::repeat([NO_TOKEN, 0]))).for_each(|(place, token)| *place = token);
}

/// Reads a row's report (`[REPORT_WORDS]`) with `top` most likely tokens.
pub fn token_logprobs(report: &[u32], top: usize) -> TokenLogprobs {
    let places = report[2..].as_chunks::<2>().0.iter().take(top).take_while(|place| place[0] != NO_TOKEN);
    let top = places.map(|&[id, logprob]| (id, f32::from_bits(logprob))).collect();
    TokenLogprobs { logprob: f32::from_bits(report[0]), rank: report[1], top }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;
    use crate::testing::Host;
    use pegainfer_core::sampling::SamplingParams;

    #[test]
    fn rows_get_what_they_asked_for() {
        Host::each(|mut host| {
            let logits = [0.0, 1.0, f32::NAN, 1.0, 0.0, 0.0, 3.0, 2.0, 5.0, 4.0, 3.0, f32::NEG_INFINITY];
            let (rows, asked) = (3, [Some(MAX_LOGPROBS), None, Some(2)]);
            let mut x = host.zeros("logits", &[rows, 4], DType::F32);
            x.host_mut::<f32>().copy_from_slice(&logits);
            let packed = asked.iter().flat_map(|&n| Draw::new(&SamplingParams::greedy(), 0, n).words());
            let mut draws = host.zeros("draws", &[rows, DRAW_WORDS], DType::U32);
            draws.host_mut::<u32>().copy_from_slice(&packed.collect::<Vec<_>>());
            let mut sampled = host.zeros("sampled", &[rows], DType::U32);
            let mut out = host.zeros("logprobs", &[rows, REPORT_WORDS], DType::U32);
            ops::sample(&mut host.exec, &x, &draws, &mut sampled).unwrap();
            assert_eq!(sampled.host::<u32>(), [1, 2, 0]);
            logprobs(&mut host.exec, &x, &draws, &sampled, &mut out).unwrap();
            let reports: Vec<&[u32]> = out.host::<u32>().chunks(REPORT_WORDS).collect();
            let first = token_logprobs(reports[0], MAX_LOGPROBS);
            assert_eq!((first.rank, first.top.iter().map(|t| t.0).collect::<Vec<_>>()), (1, vec![1, 3, 0]));
            assert!((first.logprob + (2.0 + (-1f32).exp()).ln()).abs() < 1e-6, "{first:?}");
            assert_eq!(reports[1], [0; REPORT_WORDS]);
            let ids: Vec<u32> = token_logprobs(reports[2], 2).top.iter().map(|t| t.0).collect();
            assert_eq!(ids, [0, 1]);
            sampled.host_mut::<u32>()[1] = 4;
            assert!(logprobs(&mut host.exec, &x, &draws, &sampled, &mut out).is_err());
        });
    }
}
