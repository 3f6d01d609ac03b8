//! Sizes of an attention batch, known to the host: they choose kernels and count work.

/// Maximum number of queries of a row whose keys and values are split over the GPU (decode attention), with one query
/// head per KV head; with `g` query heads, a `g`-th of it.
pub const DECODE_QUERIES: usize = crate::limits::attention::DECODE_ROWS;

/// A ragged batch of rows, each with its queries and its context. Rows without queries count for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionLoad {
    /// Minimum number of queries of a row.
    pub min_queries: usize,
    /// Maximum number of queries of a row.
    pub max_queries: usize,
    /// Maximum number of queries among rows with at most [`DECODE_QUERIES`]; 0 without such rows.
    pub max_decode_queries: usize,
    /// Tokens that the row with the shortest context attends to.
    pub min_context: usize,
    /// Tokens that the row with the longest context attends to.
    pub max_context: usize,
    /// Longest context that the launches have to fit: `max_context`, or the engine's longest context if a CUDA graph
    /// keeps them for later steps.
    pub longest: usize,
    /// Sum over queries of the tokens they attend to.
    pub attended: u64,
    /// Sum over rows of their contexts.
    pub cached: u64,
    /// Rows of one query.
    pub decode_rows: usize,
    /// Sum of their contexts.
    pub decode_context: u64,
    /// True if the queries are only those of sampled tokens. The step has then written keys and values of more tokens,
    /// so none may be read before earlier kernels are complete.
    pub sampled_only: bool,
}

/// The part of an [`AttentionLoad`] that may affect the launches of decode attention. It excludes the contexts of the
/// step, so that a CUDA graph fits the contexts of every later step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeLoad {
    /// Maximum number of queries of a row.
    pub max_queries: usize,
    /// Maximum number of queries among rows with at most [`DECODE_QUERIES`].
    pub max_decode_queries: usize,
    /// Longest context; see [`AttentionLoad::longest`].
    pub longest: usize,
}

impl AttentionLoad {
    /// The part of the load on which the launches of decode attention may depend.
    pub fn decode(&self) -> DecodeLoad {
        let Self { max_queries, max_decode_queries, longest, .. } = *self;
        DecodeLoad { max_queries, max_decode_queries, longest }
    }

    /// The load of `rows`, each as its queries and its context: the tokens that it attends to, its queries included.
    /// The last query of a row sits at the end of its context.
    pub fn of(rows: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut rows = rows.into_iter().filter(|(queries, _)| *queries > 0).peekable();
        let Some(&(queries, context)) = rows.peek() else { return Self::default() };
        let first = Self { min_queries: queries, min_context: context, ..Self::default() };
        rows.fold(first, |load, (queries, context)| {
            let before = (queries * (queries - 1) / 2) as u64; // the queries do not attend to those after them
            let decodes = queries == 1;
            Self {
                min_queries: load.min_queries.min(queries),
                max_queries: load.max_queries.max(queries),
                max_decode_queries: if queries <= DECODE_QUERIES {
                    load.max_decode_queries.max(queries)
                } else {
                    load.max_decode_queries
                },
                min_context: load.min_context.min(context),
                max_context: load.max_context.max(context),
                longest: load.longest.max(context),
                attended: load.attended + ((queries * context) as u64).saturating_sub(before),
                cached: load.cached + context as u64,
                decode_rows: load.decode_rows + usize::from(decodes),
                decode_context: load.decode_context + if decodes { context as u64 } else { 0 },
                sampled_only: false,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_decode_are_told_from_prompts() {
        let load = AttentionLoad::of([(1, 40), (3, 9), (0, 70), (32, 50)]);
        assert_eq!((load.min_queries, load.max_queries, load.max_decode_queries), (1, 32, 3));
        assert_eq!((load.min_context, load.max_context), (9, 50));
        assert_eq!((load.decode_rows, load.decode_context, load.cached), (1, 40, 99));
        assert_eq!(load.attended, 40 + (7 + 8 + 9) + (19..=50).sum::<u64>());
        assert_eq!(AttentionLoad::of([]), AttentionLoad::default());
    }
}
