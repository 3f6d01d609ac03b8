//! Outputs of a norm in the formats of the GEMMs after it.

use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{self as ops, Activation, Rounded};
use std::ops::Range;

/// An activation after a norm, exact and as the reference rounds it for its FP8 and FP4 matrices.
#[derive(Debug)]
pub(crate) struct Normed {
    /// `[tokens, width]`.
    pub exact: Tensor,
    /// The rounded activation; `None` if activations are not rounded.
    low: Option<Low>,
    held: Held,
}

/// Tokens and forms that this rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// All forms, for all tokens.
    All,
    /// All forms, for its own tokens.
    Own,
    /// All forms except the packed one, for all tokens.
    Unpacked,
    /// The exact activation, of all tokens.
    Exact,
}

/// A rounded activation.
#[derive(Debug)]
struct Low {
    /// `[tokens, width]`, of the dtype of [`Normed::exact`].
    values: Tensor,
    /// The values as packed rows (`pack_rows`); `None` if no kernel of the device uses them.
    packed: Option<Tensor>,
}

impl Normed {
    pub fn new(
        exec: &mut Exec,
        name: &str,
        (tokens, width): (usize, usize),
        dtype: DType,
        quantize: bool,
    ) -> std::io::Result<Self> {
        let exact = exec.tensor(name, &[tokens, width], dtype)?;
        if !quantize {
            return Ok(Self { exact, low: None, held: Held::All });
        }
        let values = exec.tensor(&format!("{name}.fp8"), &[tokens, width], dtype)?;
        let packs = ops::takes_packed_rows(exec, dtype, width).map_err(std::io::Error::other)?;
        let shape = [tokens, ops::packed_bytes(width)];
        let packed = packs.then(|| exec.tensor(&format!("{name}.packed"), &shape, DType::U8)).transpose()?;
        Ok(Self { exact, low: Some(Low { values, packed }), held: Held::All })
    }

    pub fn set_rows(&mut self, tokens: usize) {
        self.set_range(0..tokens);
    }

    fn set_range(&mut self, tokens: Range<usize>) {
        let low = self.low.iter_mut().flat_map(|Low { values, packed }| std::iter::once(values).chain(packed));
        std::iter::once(&mut self.exact).chain(low).for_each(|tensor| tensor.set_range(tokens.start, tokens.len()));
    }

    /// RMSNorm of `x`: writes the activation, and its rounded and packed forms.
    pub fn norm(&mut self, exec: &mut Exec, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(), OpError> {
        let (exact, low) = self.outputs();
        ops::norm(exec, x, weight, eps, exact, low)
    }

    /// Lends the rows of the rank's own tokens to `write`, an op that writes all forms of these;
    /// [`gather`](Self::gather) exchanges them.
    pub fn write_own(
        &mut self,
        own: Range<usize>,
        write: impl FnOnce((&mut Tensor, Option<Rounded<'_>>)) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let all = self.exact.rows_cols().0;
        self.set_range(own);
        let written = write(self.outputs());
        self.set_rows(all);
        self.held = Held::Own;
        written
    }

    /// True if the rank has only the rows of its own tokens.
    pub fn is_own(&self) -> bool {
        self.held == Held::Own
    }

    /// Gathers the other ranks' tokens, for ops that round the exact activation themselves (`rounds`), otherwise for
    /// ops that take the rounded one. `rows`:
    /// see [`OwnTokens`](crate::shard::OwnTokens).
    pub fn gather(
        &mut self,
        exec: &mut Exec,
        communicator: &dyn Communicator,
        rows: usize,
        rounds: bool,
    ) -> Result<(), OpError> {
        let all = self.exact.rows_cols().0;
        let values = self.low.as_mut().filter(|_| !rounds).map(|low| &mut low.values);
        self.held = if rounds { Held::Exact } else { Held::Unpacked };
        std::iter::once(&mut self.exact).chain(values).try_for_each(|tensor| {
            tensor.set_rows(rows);
            let gathered = communicator.all_gather_rows(exec, tensor);
            tensor.set_rows(all);
            gathered
        })
    }

    /// The activation and its rounded and packed forms, for an op that writes them.
    pub fn outputs(&mut self) -> (&mut Tensor, Option<Rounded<'_>>) {
        self.held = Held::All;
        let low = self.low.as_mut().map(|Low { values, packed }| Rounded { values, packed: packed.as_mut() });
        (&mut self.exact, low)
    }

    /// The input of GEMMs with FP8 and FP4 matrices: the rounded activation if activations are rounded, else the exact
    /// one. `None` if they round the exact one themselves.
    pub fn rounded(&self) -> Option<Activation<'_>> {
        match &self.low {
            Some(_) if self.held == Held::Exact => None,
            Some(Low { values, packed }) => {
                Some(Activation { values, packed: packed.as_ref().filter(|_| self.held == Held::All) })
            }
            None => Some((&self.exact).into()),
        }
    }

    /// The input of a GEMM with `w`: as [`rounded`](Self::rounded) if `w` is FP8 or FP4, else the exact activation.
    pub fn input(&self, w: &Matrix) -> Activation<'_> {
        self.rounded().filter(|_| w.is_quantized()).unwrap_or((&self.exact).into())
    }
}
