//! The rules by which tokens choose experts.

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
