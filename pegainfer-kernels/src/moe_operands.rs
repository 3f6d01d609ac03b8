//! Operands of the ops of a mixture of experts.

use crate::ops::Matrix;

/// Rules of the routing of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteSpec {
    /// Number of experts to choose from.
    pub experts: usize,
    /// Number of experts of a token, without the shared one.
    pub chosen: usize,
    /// True if the weights of a token's experts sum up to 1, otherwise the softmax of all experts does.
    pub normalize: bool,
    /// True if there is a shared expert. It counts as expert number `experts`, and every token has it.
    pub shared: bool,
}

impl RouteSpec {
    /// Experts of a token, the shared one included.
    pub fn per_token(&self) -> usize {
        self.chosen + usize::from(self.shared)
    }

    /// All experts, the shared one included.
    pub fn count(&self) -> usize {
        self.experts + usize::from(self.shared)
    }

    /// Rows of the router's matrix: a logit for each of [`count`](Self::count) experts, and rows of zeros up to a
    /// multiple of 8, as GEMMs on a GPU take them.
    pub fn rows(&self) -> usize {
        self.count().next_multiple_of(8)
    }
}

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
}

impl Experts {
    /// Inner dimension of an expert.
    pub fn width(&self) -> usize {
        self.down.shape().1
    }
}
