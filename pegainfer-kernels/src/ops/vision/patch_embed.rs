//! Pixels to the embedding of their patches.

use super::operands::{is_values, no_gpu_kernel};
use crate::cpu::vision::patches::{self as cpu, Inputs, PATCH, PATCH_VALUES};
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[i] = weight · x_i + bias`, where `x_i = v / 127.5 - 1` for the bytes `v` of patch `i`: 16 x 16 pixels, in the
/// order colour, row, column.
///
/// `pixels`: `[bytes]` u8, images one after the other, each with rows of RGB pixels from top to bottom; `patches`:
/// `[n, 2]` u32: the byte of the patch's top left pixel, and the bytes of a row of pixels of its image; `weight`:
/// `[hidden, 768]` f32; `bias`: `[hidden]` f32; `out`: `[n, hidden]` bf16 or f32. f32 with one final rounding. A patch
/// does not depend on the others.
///
/// A still image has two equal pictures in models of video, whose weight is `[hidden, 3, 2, 16, 16]`: `weight` is then
/// the sum of its two halves.
///
/// # Errors
/// Wrong shapes or dtypes; on the CPU, a patch outside `pixels`; a GPU.
pub fn patch_embed(
    exec: &mut Exec,
    pixels: &Tensor,
    patches: &Tensor,
    (weight, bias): (&Tensor, &Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("patch_embed");
    let (n, hidden) = (patches.rows_cols().0, bias.elements());
    check.is(pixels, DType::U8, &[pixels.elements()])?;
    check.is(patches, DType::U32, &[n, 2])?;
    check.is(weight, DType::F32, &[hidden, PATCH_VALUES])?;
    check.is(bias, DType::F32, &[hidden])?;
    is_values(check, out, &[n, hidden])?;
    exec.record(|_| {
        let flops = 2 * (n * hidden * PATCH_VALUES) as u64;
        OpRecord::new(check.0, "patches", &[pixels, patches, weight, bias], &[out], flops)
    });
    match exec.device() {
        Device::Cpu(isa) => {
            let (pixels, patches) = (pixels.host::<u8>(), patches.host::<u32>().as_chunks().0);
            let last = |[first, stride]: [u32; 2]| first as usize + (PATCH - 1) * stride as usize + 3 * PATCH;
            check.that(patches.iter().all(|patch| last(*patch) <= pixels.len()), "a patch is outside the pixels")?;
            let inputs = Inputs { pixels, patches, weight: weight.host(), bias: bias.host() };
            match out.dtype() {
                DType::F32 => cpu::patch_embed::<f32>(isa, &inputs, out.host_mut()),
                _ => cpu::patch_embed::<bf16>(isa, &inputs, out.host_mut()),
            }
        }
        Device::Cuda => no_gpu_kernel(check)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn matches_f64_for_patches_of_two_images() {
        Host::each(|mut host| {
            // Two images, 32 and 48 pixels wide, 16 and 32 high.
            let sizes = [(32, 16), (48, 32)];
            let bytes: usize = sizes.iter().map(|(w, h)| 3 * w * h).sum();
            let colours: Vec<u8> = bf16s(bytes, 1).iter().map(|x| (x.to_f32() * 63.0 + 127.0) as u8).collect();
            let places: [[u32; 2]; 5] = [[0, 96], [48, 96], [1536, 144], [1536 + 96, 144], [1536 + 16 * 144 + 96, 144]];
            let hidden = 37;
            let [w, b] = [(hidden * PATCH_VALUES, 2), (hidden, 3)].map(|(n, seed)| bf16s(n, seed));
            let mut pixels = host.zeros("pixels", &[bytes], DType::U8);
            pixels.host_mut::<u8>().copy_from_slice(&colours);
            let mut patches = host.zeros("patches", &[places.len(), 2], DType::U32);
            patches.host_mut::<u32>().copy_from_slice(places.as_flattened());
            let mut weight = host.zeros("weight", &[hidden, PATCH_VALUES], DType::F32);
            weight.host_mut::<f32>().iter_mut().zip(&w).for_each(|(to, w)| *to = w.to_f32());
            let mut bias = host.zeros("bias", &[hidden], DType::F32);
            bias.host_mut::<f32>().iter_mut().zip(&b).for_each(|(to, b)| *to = b.to_f32());
            let mut out = host.zeros("out", &[places.len(), hidden], DType::F32);
            patch_embed(&mut host.exec, &pixels, &patches, (&weight, &bias), &mut out).unwrap();
            for (i, got) in out.host::<f32>().iter().enumerate() {
                let [first, stride] = places[i / hidden].map(|n| n as usize);
                let mut sum = b[i % hidden].to_f64();
                for (at, w) in w[i % hidden * PATCH_VALUES..][..PATCH_VALUES].iter().enumerate() {
                    let (colour, y, x) = (at / 256, at / 16 % 16, at % 16);
                    sum += w.to_f64() * (f64::from(colours[first + y * stride + 3 * x + colour]) / 127.5 - 1.0);
                }
                assert!((f64::from(*got) - sum).abs() < 2e-4, "{i}: {got} {sum}");
            }
            patches.host_mut::<u32>()[8] += 3;
            let error = patch_embed(&mut host.exec, &pixels, &patches, (&weight, &bias), &mut out).unwrap_err();
            assert!(error.message.contains("outside the pixels"), "{error}");
        });
    }
}
