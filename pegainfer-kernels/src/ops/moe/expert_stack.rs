//! The weights of the experts of a layer.

use crate::choice::ExpertShape;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::Device;
use pegainfer_core::tensor::OpError;

/// Experts of one width, stacked along the rows of their matrices.
#[derive(Debug)]
pub struct Experts {
    /// For each expert the rows of its gate, then those of `up`: `[count * 2 * width, hidden]`. If it is a
    /// [`Stacked`](Matrix::Stacked) matrix, each of its parts has whole experts.
    pub gate_up: Matrix,
    /// `[count * hidden, width]`, likewise.
    pub down: Matrix,
    /// Number of experts.
    pub count: usize,
    /// True if the last expert is one that every token has.
    pub shared: bool,
}

impl Experts {
    /// Inner dimension of an expert.
    pub fn width(&self) -> usize {
        self.down.shape().1
    }

    /// Number of experts that `tokens` tokens with `k` experts each read at least once, if they choose evenly and
    /// independently: `E (1 - (1 - k / E)^tokens)` of `E` routed experts, and the shared one. Text chooses less evenly,
    /// so that it reads fewer.
    pub(super) fn expected_hits(&self, tokens: usize, k: usize) -> f64 {
        let shared = f64::from(self.shared);
        let (routed, k) = (self.count as f64 - shared, k as f64 - shared);
        shared + routed * (1.0 - (1.0 - k / routed).powi(tokens as i32))
    }

    /// True if all weights are bf16.
    pub(crate) fn is_bf16(&self) -> bool {
        !self.gate_up.is_quantized() && !self.down.is_quantized()
    }

    /// What the choice of a kernel depends on.
    pub(super) fn shape(&self) -> ExpertShape {
        let columns = [self.gate_up.shape().1, self.width()];
        let in_parts = matches!(self.down, Matrix::Stacked(_));
        ExpertShape { count: self.count, is_bf16: self.is_bf16(), columns, in_parts }
    }

    /// Checks the matrices. The error names what does not fit.
    pub(super) fn check(&self, check: Check, device: Device, hidden: usize) -> Result<(), OpError> {
        let (count, width) = (self.count, self.width());
        for (w, rows, columns) in [(&self.gate_up, 2 * width, hidden), (&self.down, hidden, width)] {
            w.as_ref().check_dense(check, device, (count * rows, columns))?;
            let parts = if let Matrix::Stacked(parts) = w { &parts[..] } else { std::slice::from_ref(w) };
            let whole = parts.iter().all(|part| part.shape().0.is_multiple_of(rows));
            check.that(whole, "a part of a stack has half an expert")?;
            let has_blocks = parts.iter().any(|part| matches!(part, Matrix::Fp8 { .. }));
            let blocks = count <= 1 || rows.is_multiple_of(crate::cpu::weights::BLOCK) || !has_blocks;
            check.that(blocks, "experts in FP8 must have whole blocks of 128 rows")?;
        }
        Ok(())
    }
}
