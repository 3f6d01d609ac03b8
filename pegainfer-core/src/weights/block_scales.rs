//! FP8 weights in the format of Qwen's checkpoints: `X.weight` in e4m3, and `X.weight_scale_inv` with a scale for each
//! block of 128 x 128. Despite its name, the scale multiplies the codes.

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use safetensors::Dtype;

/// Edge of the blocks that share a scale.
pub const SCALE_BLOCK: usize = 128;
/// Dtypes of scales.
const SCALES: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

/// Name of the tensor that has the scales of the weight `name`.
pub fn scale_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Name of the tensor that has the scales of the blocks of the FP8 weight `name`: compressed-tensors calls it
/// `X.weight_scale`.
pub(super) fn stored_scale_name(checkpoint: &Checkpoint, name: &str) -> String {
    let (qwen, other) = (scale_name(name), format!("{name}_scale"));
    if !checkpoint.contains(&qwen) && checkpoint.contains(&other) { other } else { qwen }
}

/// True if the FP8 weight `name` has a scale for each block of 128 x 128.
pub(super) fn has_block_scales(checkpoint: &Checkpoint, name: &str) -> bool {
    let (Some((_, shape)), Some((_, scales))) =
        (checkpoint.describe(name), checkpoint.describe(&stored_scale_name(checkpoint, name)))
    else {
        return false;
    };
    let (&[n, _], &[_, _]) = (shape, scales) else { return false };
    let blocks: Vec<usize> = shape.iter().map(|n| n.div_ceil(SCALE_BLOCK)).collect();
    n > 1 && scales == blocks
}

impl Checkpoint {
    /// Checks that each FP8 weight has scales of the right shape and that each scale belongs to an FP8 weight. There
    /// must be none of either unless config.json announces FP8 (`quantized`).
    pub fn check_block_scales(&self, quantized: bool) -> Result<(), WeightsError> {
        let mut names: Vec<&str> = self.names().collect();
        names.sort_unstable();
        names.into_iter().try_for_each(|name| self.check_tensor(name, quantized))
    }

    fn check_tensor(&self, name: &str, quantized: bool) -> Result<(), WeightsError> {
        let error = |message: String| Err(WeightsError::BlockScales { name: name.to_owned(), message });
        let described = |name: &str| self.describe(name).map(|(dtype, shape)| (dtype, shape.to_vec()));
        if let Some(weight) = name.strip_suffix("_scale_inv") {
            return match described(weight) {
                Some((Dtype::F8_E4M3, _)) => Ok(()),
                Some((dtype, shape)) => {
                    error(format!("has scales for {weight}, which is {dtype:?} {shape:?}, not F8_E4M3"))
                }
                None => error(format!("has scales for {weight}, which the checkpoint does not have")),
            };
        }
        // Scales of NVFP4 weights are also e4m3.
        let Some((Dtype::F8_E4M3, shape)) = described(name).filter(|_| !name.ends_with(".weight_scale")) else {
            return Ok(());
        };
        if !quantized {
            return error("is F8_E4M3, but config.json has no quantization_config".to_owned());
        }
        // One scale, or one per row: checked when the weight is opened.
        if self.contains(&format!("{name}_scale")) && !has_block_scales(self, name) {
            return Ok(());
        }
        let (scale, expected) =
            (stored_scale_name(self, name), shape.iter().map(|n| n.div_ceil(SCALE_BLOCK)).collect::<Vec<_>>());
        match described(&scale) {
            None => error(format!("is F8_E4M3, but the checkpoint has no {scale}")),
            Some((dtype, found)) if !SCALES.contains(&dtype) || found != expected || shape.len() != 2 => error(
                format!("is F8_E4M3 {shape:?} and {scale} {dtype:?} {found:?}, expected BF16, F16 or F32 {expected:?}"),
            ),
            Some(_) => Ok(()),
        }
    }
}

/// Error for a weight or scales with NaN or infinite values.
pub(super) fn not_finite(name: String) -> WeightsError {
    WeightsError::BlockScales { name, message: "has NaN or infinite values".to_owned() }
}

/// Checks that no code of the weight `name` is NaN, that is, 0x7f or 0xff.
pub(super) fn check_codes(name: &str, codes: &[u8]) -> Result<(), WeightsError> {
    match codes.iter().any(|code| code & 0x7f == 0x7f) {
        true => Err(not_finite(name.to_owned())),
        false => Ok(()),
    }
}
