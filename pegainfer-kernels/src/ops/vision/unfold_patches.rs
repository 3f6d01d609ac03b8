//! Pixels to the rows of a GEMM that embeds their patches.

use crate::cpu::vision::patches as cpu;
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub use crate::limits::vision::{COPIES, PATCH, PATCH_VALUES};

/// `out[i, c] = 2 v - 255` for the bytes `v` of patch `i`, 16 x 16 pixels in the order colour, row, column, for each of
/// three copies `c`. The numbers are exact, and `(2 v - 255) / 255` is the value of a pixel, in [-1, 1].
///
/// `pixels`: `[bytes]` u8, images one after the other, each with rows of RGB pixels from top to bottom; `patches`:
/// `[n, 2]` u32: the byte of the patch's top left pixel, and the bytes of a row of pixels of its image; `out`:
/// `[n, 3 * 768]` bf16. A weight in the three parts of [`patch_weight`] then multiplies patches with the precision of
/// f32.
///
/// # Errors
/// Wrong shapes or dtypes; on the CPU, a patch outside `pixels`, which stops a GPU.
pub fn unfold_patches(exec: &mut Exec, pixels: &Tensor, patches: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (check, n) = (Check("unfold_patches"), patches.rows_cols().0);
    check.is(pixels, DType::U8, &[pixels.elements()])?;
    check.is(patches, DType::U32, &[n, 2])?;
    check.is(out, DType::Bf16, &[n, COPIES * PATCH_VALUES])?;
    exec.record(|_| {
        let bytes = (n * PATCH_VALUES) as u64 + patches.bytes() + out.bytes();
        OpRecord::new(check.0, "rows", &[pixels, patches], &[out], (2 * n * PATCH_VALUES) as u64).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let (pixels, patches) = (pixels.host::<u8>(), patches.host::<u32>().as_chunks().0);
            let last = |[first, stride]: [u32; 2]| first as usize + (PATCH - 1) * stride as usize + 3 * PATCH;
            check.that(patches.iter().all(|patch| last(*patch) <= pixels.len()), "a patch is outside the pixels")?;
            cpu::unfold_patches(pixels, patches, out.host_mut());
        }
        Device::Cuda => cuda::vision::unfold_patches(exec, pixels, patches, out)?,
        Device::Meta => {}
    }
    Ok(())
}

/// A weight of patches in f32, `[hidden, 768]`, as the bf16 weight of [`unfold_patches`]' rows, `[hidden, 3 * 768]`:
/// three numbers whose sum is `w / 255` within 2^-24.
pub fn patch_weight(weight: &[f32]) -> Vec<bf16> {
    let part = |w: &f32, part: usize| {
        let mut rest = w / 255.0;
        for _ in 0..part {
            rest -= bf16::from_f32(rest).to_f32();
        }
        bf16::from_f32(rest)
    };
    let rows = weight.chunks_exact(PATCH_VALUES);
    rows.flat_map(|row| (0..COPIES).flat_map(move |i| row.iter().map(move |w| part(w, i)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;
    use crate::testing::{Host, bf16s};

    #[test]
    fn a_gemm_embeds_patches_of_two_images() {
        Host::each(|mut host| {
            // Two images, 32 and 48 pixels wide, 16 and 32 high.
            let sizes = [(32, 16), (48, 32)];
            let bytes: usize = sizes.iter().map(|(w, h)| 3 * w * h).sum();
            let colours: Vec<u8> = bf16s(bytes, 1).iter().map(|x| (x.to_f32() * 63.0 + 127.0) as u8).collect();
            let places: [[u32; 2]; 5] = [[0, 96], [48, 96], [1536, 144], [1536 + 96, 144], [1536 + 16 * 144 + 96, 144]];
            let (hidden, width) = (37, COPIES * PATCH_VALUES);
            // Weights with more bits than bf16 has.
            let w: Vec<f32> = bf16s(hidden * PATCH_VALUES, 2).iter().map(|w| w.to_f32() * 1.000_123_4).collect();
            let mut pixels = host.zeros("pixels", &[bytes], DType::U8);
            pixels.host_mut::<u8>().copy_from_slice(&colours);
            let mut patches = host.zeros("patches", &[places.len(), 2], DType::U32);
            patches.host_mut::<u32>().copy_from_slice(places.as_flattened());
            let weight = host.bf16("weight", &[hidden, width], &patch_weight(&w));
            let mut rows = host.zeros("rows", &[places.len(), width], DType::Bf16);
            let mut out = host.zeros("out", &[places.len(), hidden], DType::F32);
            unfold_patches(&mut host.exec, &pixels, &patches, &mut rows).unwrap();
            ops::linear(&mut host.exec, &rows, &weight, &mut out).unwrap();
            for (i, got) in out.host::<f32>().iter().enumerate() {
                let [first, stride] = places[i / hidden].map(|n| n as usize);
                let mut sum = 0.0;
                for (at, w) in w[i % hidden * PATCH_VALUES..][..PATCH_VALUES].iter().enumerate() {
                    let (colour, y, x) = (at / 256, at / 16 % 16, at % 16);
                    sum += f64::from(*w) * (f64::from(colours[first + y * stride + 3 * x + colour]) / 127.5 - 1.0);
                }
                assert!((f64::from(*got) - sum).abs() < 2e-5, "{i}: {got} {sum}");
            }
            patches.host_mut::<u32>()[8] += 3;
            let error = unfold_patches(&mut host.exec, &pixels, &patches, &mut rows).unwrap_err();
            assert!(error.message.contains("outside the pixels"), "{error}");
        });
    }
}
