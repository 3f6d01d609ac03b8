//! Group-quantised weights with activations in int8 per 32 columns ("W4A8").
//!
//! A row of x is rounded once per call: 32 columns share the f32 scale `sx = max|x| / 127`, and a code is the integer
//! nearest to `x / sx`, ties to even ([`rounding`]). Codes of weights are unsigned bytes `u`, at most 8 bits, and
//! `w = s·(u - c) - o` with a constant `c` of the format. An output is
//!
//! `sum over each 32 columns of sx · (s · sum((u - c)·q) - o · sum(q))`,
//!
//! where the sums over columns are exact integers, in int32. Formats with groups of 16 have two terms
//! `s · sum((u - c)·q)` per 32 columns.
//! The order of the f32 operations is fixed: 32 columns after 32 columns, with FMAs. The bits of an output therefore
//! depend only on its x row, its w row and `k`, on every instruction set alike.
//!
//! [`task`] has the loops, written once for the instruction sets of [`vector`]: a tile has sixteen rows of w, one per
//! lane. [`codes`] and [`scales`] decode 256 columns of a tile into a [`Panel`](panel::Panel) in L1, which all rows of
//! x then read, up to eight at a time. Integer products are `vpdpbusd` (AVX-512 VNNI), `vpmaddubsw` (AVX2) or `sdot`
//! (NEON); a machine with AVX-512 but without VNNI takes AVX2, and [`Isa::Amx`] takes AVX-512.
//!
//! With VNNI, 32 columns of a tile and a row of x take eight integer instructions and three or four in f32 on the same
//! ports. Two tiles share each load of x, because loads would be the limit otherwise. On AVX2, products are added in
//! int16 as long as they fit, 32 columns of 4 bits, which saves most of the conversions to int32.
//!
//! Rounding x to int8 is the technique of llama.cpp's Q8_0 activations; scaling sums instead of weights keeps codes
//! exact.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod codes;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod portable;
mod rounding;
mod scales;
mod task;
mod vector;

use super::grid::{Grid, RowGroups};
use super::problem::Problem;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::Isa;
use crate::cpu::weights::Grouped;
use layout::Layout;
use panel::{ROWS, RUN};
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use pegainfer_core::weights::grouped::GroupFormat;
use rounding::{Round, Run, WORDS};
use std::borrow::Cow;
use task::Task;
use vector::{Kernel, Tile};

/// True if rows of this format can be multiplied in int8: all but FP8, and groups of 16 with offsets.
pub(super) fn supports(format: GroupFormat) -> bool {
    Layout::new(format, RUN).is_some()
}

/// `out = x * w^T` with x rounded to int8.
///
/// # Panics
/// If the format is not [supported](supports).
pub(super) fn run(isa: Isa, p: &Problem<'_, Grouped<'_>>, scratch: &mut Scratch) {
    let Some(layout) = Layout::new(p.w.format, p.k) else { panic!("{} has no int8 path", p.w.format) };
    if p.m == 0 || p.n == 0 {
        return;
    }
    let (tiles, max_rows) = shape(isa, &layout);
    let groups = RowGroups::new(p.m, max_rows);
    let runs = p.k / RUN;
    let x = scratch.slice::<u32>(p.m * runs * WORDS).as_chunks_mut::<WORDS>().0;
    let rounded = Disjoint::new(x);
    team::for_each(groups.count(), |i| {
        let rows = groups.rows(i);
        // SAFETY: groups are disjoint.
        let out = unsafe { rounded.slice(rows.start * runs, rows.len() * runs) };
        dispatch(isa, Round { x: &p.x[rows.start * p.k..rows.end * p.k], k: p.k, layout: &layout, out });
    });
    let w = whole_tiles(p.w, p.n, p.k);
    let group_bytes = groups.rows(0).len() * runs * size_of::<Run>();
    Grid::new(groups.count(), group_bytes, usize::MAX, p.n, tiles * ROWS).for_each(|groups_of_task, cols| {
        let task = Task {
            layout: &layout,
            codes: &w.0,
            scales: &w.1,
            n: p.n,
            x,
            groups,
            of_task: groups_of_task,
            cols,
            out: (p.sink, p.stride),
        };
        dispatch(isa, task);
    });
}

/// The codes and scales of at least a tile of rows: a smaller matrix is padded with zeros.
fn whole_tiles<'a>(w: Grouped<'a>, n: usize, k: usize) -> (Cow<'a, [u8]>, Cow<'a, [u8]>) {
    let pad = |bytes: &'a [u8], row: usize| {
        assert_eq!(bytes.len(), n * row, "codes and scales have {n} rows");
        if n >= ROWS {
            return Cow::Borrowed(bytes);
        }
        let mut padded = bytes.to_vec();
        padded.resize(ROWS * row, 0);
        Cow::Owned(padded)
    };
    (pad(w.codes, w.format.code_bytes(k)), pad(w.scales, w.format.scale_bytes(k)))
}

/// Runs `kernel` on the path of `isa`.
fn dispatch<K: Kernel>(isa: Isa, kernel: K) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512
        && let Some(path) = avx512::Vnni::detect()
    {
        return path.run(kernel);
    }
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx2
        && let Some(path) = avx2::Avx2::detect()
    {
        return path.run(kernel);
    }
    #[cfg(target_arch = "aarch64")]
    if isa >= Isa::Neon
        && let Some(path) = neon::Neon::detect()
    {
        return path.run(kernel);
    }
    let _ = isa;
    kernel.run(portable::Portable);
}

/// Number of tiles, and maximum number of rows of x, that the path of `isa` multiplies at the same time.
fn shape(isa: Isa, layout: &Layout) -> (usize, usize) {
    struct Shape<'a>(bool, &'a mut (usize, usize));
    impl Kernel for Shape<'_> {
        #[inline(always)]
        fn run<T: Tile>(self, _: T) {
            *self.1 = (T::TILES, T::MAX_ROWS[usize::from(self.0)]);
        }
    }
    let mut shape = (0, 0);
    dispatch(isa, Shape(layout.halves, &mut shape));
    shape
}
