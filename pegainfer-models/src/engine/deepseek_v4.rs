//! The DeepSeek-V4 family.

use super::family::Family;
use pegainfer_deepseek_v4::DeepSeekV4;

/// DeepSeek-V4-Flash, whose official checkpoints no GPU holds alone.
pub const FAMILY: Family = Family { fits_one: false, ..Family::new::<DeepSeekV4>() };
