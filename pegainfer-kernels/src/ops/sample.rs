//! Draws one token per row of logits.

use super::check::Check;
use super::linear_argmax::KEY_WORDS;
use crate::cpu::sampling::{self, SampleScratch};
use crate::cuda;
use crate::draw::DRAW_WORDS;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Samples each row by its own parameters: temperature, min-p, top-k, top-p, one draw; greedy rows take the most
/// likely token, the lowest id on a tie. The same logits give the same token on every device and in every batch.
///
/// `logits`: `[rows, vocab]` f32; `draws`: `[rows, DRAW_WORDS]` u32, packed [`Draw`](super::Draw)s; `keys`: `[rows,
/// KEY_WORDS]` u32, of the most likely tokens of these logits, as [`linear_argmax`](super::linear_argmax) finds them, or
/// 0: a GPU need not look for what they say. They are zeros afterwards. `out`: `[rows]` u32. Does not wait for a GPU.
pub fn sample(
    exec: &mut Exec,
    logits: &Tensor,
    draws: &Tensor,
    mut keys: Option<&mut Tensor>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("sample");
    let (rows, vocab) = logits.rows_cols();
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(draws, DType::U32, &[rows, DRAW_WORDS])?;
    keys.as_deref().map_or(Ok(()), |keys| check.is(keys, DType::U32, &[rows, KEY_WORDS]))?;
    check.is(out, DType::U32, &[rows])?;
    check.that(vocab > 0, "there is no vocabulary")?;
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "sample" } else { "rows" };
        let flops = 2 * logits.elements() as u64;
        match keys.as_deref() {
            Some(keys) => OpRecord::new("sample", kernel, &[logits, draws, keys], &[keys, out], flops),
            None => OpRecord::new("sample", kernel, &[logits, draws], &[out], flops),
        }
    });
    match exec.device() {
        Device::Cpu(_) => {
            let mut scratch: Vec<SampleScratch> = (0..exec.threads()).map(|_| SampleScratch::default()).collect();
            sampling::sample_rows(logits.host(), vocab, draws.host(), &mut scratch, out.host_mut());
            if let Some(keys) = &mut keys {
                keys.host_mut::<u32>().fill(0);
            }
        }
        Device::Cuda => cuda::sample(exec, logits, draws, keys, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::testing::Host;
    use pegainfer_core::sampling::SamplingParams;

    #[test]
    fn keys_are_cleared() {
        Host::each(|mut host| {
            let mut logits = host.zeros("logits", &[2, 4], DType::F32);
            logits.host_mut::<f32>().copy_from_slice(&[0.0, 1.0, 2.0, 1.0, 3.0, 3.0, 2.0, 1.0]);
            let mut draws = host.zeros("draws", &[2, DRAW_WORDS], DType::U32);
            let greedy = Draw::new(&SamplingParams::greedy(), 0, None).words();
            draws.host_mut::<u32>().copy_from_slice(&greedy.repeat(2));
            let mut keys = host.zeros("keys", &[2, KEY_WORDS], DType::U32);
            keys.host_mut::<u32>()[..KEY_WORDS].copy_from_slice(&[!2, 2f32.to_bits() | 1 << 31]);
            let mut out = host.zeros("sampled", &[2], DType::U32);
            sample(&mut host.exec, &logits, &draws, Some(&mut keys), &mut out).unwrap();
            assert_eq!((out.host::<u32>(), keys.host::<u32>()), (&[2, 0][..], &[0; 2 * KEY_WORDS][..]));
            let mut narrow = host.zeros("keys", &[1, KEY_WORDS], DType::U32);
            assert!(sample(&mut host.exec, &logits, &draws, Some(&mut narrow), &mut out).is_err());
        });
    }
}
