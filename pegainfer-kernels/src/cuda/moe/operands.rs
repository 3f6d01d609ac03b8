//! What the launches of `ops::moe::experts` take.

use crate::cuda::fp8::Rounded;
use crate::ops::{BlockScales, MatrixRef};
use pegainfer_core::tensor::{OpError, Tensor};

/// The op of these launches.
pub(super) const OP: &str = "experts";

/// One matrix of whole experts.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub codes: &'a Tensor,
    /// Scales of an FP8 matrix.
    pub scales: Option<&'a Tensor>,
}

impl<'a> Weight<'a> {
    /// An error for a format or a shape without a kernel.
    pub fn of(w: MatrixRef<'a>) -> Result<Self, OpError> {
        let message = match w {
            MatrixRef::Bf16(codes) => return Ok(Self { codes, scales: None }),
            MatrixRef::Fp8(codes, BlockScales::F32(scales)) if codes.rows_cols().1.is_multiple_of(16) => {
                return Ok(Self { codes, scales: Some(scales) });
            }
            MatrixRef::Fp8(..) => "experts in FP8 of another width than a multiple of 16: use --device cpu",
            _ => "experts in a format other than bf16 and FP8 have no GPU kernel: use --device cpu",
        };
        Err(OpError { op: OP, message: message.to_owned() })
    }

    /// Index of the format among the entries.
    pub fn format(self) -> usize {
        usize::from(self.scales.is_some())
    }

    /// Device address of the scales, 0 without.
    pub fn scales_address(self) -> u64 {
        self.scales.map_or(0, Tensor::device)
    }
}

/// Pairs with some neighbouring experts, in tiles, as `moe_group_pairs` lists them. Addresses are of the device.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub tiles: u64,
    pub pairs: u64,
    /// Most tiles.
    pub most: usize,
    /// Pairs, with experts here or elsewhere.
    pub count: usize,
}

/// Operands of `gate_up`, besides the weights. Numbers of 64 bits are device addresses.
pub(super) struct GateUp<'a> {
    pub x: u64,
    /// `x` in FP8, for a kernel that multiplies FP8 by FP8.
    pub rounded: Option<&'a Rounded>,
    pub weights: u64,
    pub h: u64,
    pub experts_of_token: usize,
    pub width: usize,
    /// Columns of `x`.
    pub k: usize,
}

/// Operands of `down`, likewise.
pub(super) struct Down {
    pub h: u64,
    pub y: u64,
    pub hidden: usize,
    /// The columns of `y` that are computed, of `hidden`, and the row length of its memory.
    pub from: usize,
    pub columns: usize,
    /// Columns of `h`.
    pub k: usize,
}
