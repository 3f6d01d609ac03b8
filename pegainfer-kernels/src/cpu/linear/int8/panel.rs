//! 256 columns of a tile of sixteen rows of w, decoded.

/// Columns of x that share a scale, and of the runs in which codes of weights are stored.
pub(super) const RUN: usize = pegainfer_core::weights::grouped::format::RUN;
/// Rows of w in a tile.
pub(super) const ROWS: usize = 16;
/// Columns of a panel, a super-block of GGUF's K types.
pub(super) const COLUMNS: usize = 256;
/// Runs of 32 columns of a panel.
pub(super) const RUNS: usize = COLUMNS / RUN;
/// Vectors of four columns in a run.
pub(super) const QUADS: usize = RUN / 4;

/// A vector: 4 bytes of each row, or an f32 of each row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line<T>(pub [T; ROWS]);

/// 256 columns of a tile: unsigned codes and the scales of runs. About 5.5 KiB, so that it stays in L1.
pub(super) struct Panel {
    /// `[runs][columns / 4][rows]`, four columns each.
    pub codes: [[Line<u32>; QUADS]; RUNS],
    /// Scale `s` of each run, or of each half of a run.
    pub s: [[Line<f32>; 2]; RUNS],
    /// Offset `o` of each run.
    pub o: [Line<f32>; RUNS],
}

impl Panel {
    /// A panel of zeros.
    pub fn new() -> Self {
        let (codes, numbers) = (Line([0; ROWS]), Line([0.0; ROWS]));
        Self { codes: [[codes; QUADS]; RUNS], s: [[numbers; 2]; RUNS], o: [numbers; RUNS] }
    }
}
