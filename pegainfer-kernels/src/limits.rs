//! Sizes and marker values shared by launchers and kernels. The build script includes this file and writes them to
//! `limits.h`: `MODULE::SOME_NAME` becomes `limits::MODULE::kSomeName` there.

/// `name: int`, `uint` and `word` are `int`, `uint32_t` and `uint32_t` in CUDA, `usize`, `usize` and `u32` here.
macro_rules! limits {
    (@type word) => { u32 };
    (@type $size:ident) => { usize };
    ($($(#[doc = $about:literal])* $module:ident {
        $($(#[doc = $doc:literal])* $name:ident: $type:ident = $value:expr;)*
    })*) => {
        $(
            $(#[doc = $about])*
            pub mod $module {
                $($(#[doc = $doc])* pub const $name: limits!(@type $type) = $value;)*
            }
        )*

        /// Modules, each with the type, name and value of its limits.
        #[allow(clippy::type_complexity, dead_code, reason = "a table for the build script and a test")]
        pub const LIMITS: &[(&str, &[(&str, &str, u64)])] = &[
            $((stringify!($module), &[$((stringify!($type), stringify!($name), $module::$name as u64)),*])),*
        ];
    };
}

limits! {
    /// The paged KV cache.
    kv_cache {
        /// Tokens of a KV block.
        BLOCK: uint = 16;
        /// Dimensions of a column of the cache: 128 bytes.
        CACHE_COLUMN: uint = 64;
        /// Slot of a token whose key and value are not written.
        NO_SLOT: word = u32::MAX;
    }
    /// Row copies.
    gather {
        /// Bit of a placeholder token id; the rest is a row of the sampled tokens.
        PLACEHOLDER: word = 1 << 31;
    }
    /// Runs of words to scattered places.
    write_runs {
        /// Words of a run: source, destination, length.
        RUN_FIELDS: uint = 3;
    }
    /// Rows of several tensors in one place.
    pack {
        /// Threads of the block that copies a part.
        THREADS: uint = 256;
        /// Words of a part: four of 64 bits.
        PART_WORDS: uint = 8;
        /// Maximum number of rows of a launch.
        MAX_ROWS: uint = 1024;
    }
    /// Mixtures of experts of all models.
    moe {
        /// Maximum number of experts that a token chooses from.
        MAX_EXPERTS: uint = 1024;
        /// Maximum number of experts of a token.
        MAX_CHOSEN: uint = 32;
        /// Threads of the block that groups pairs of a token and an expert by expert.
        GROUP_THREADS: uint = 1024;
        /// Threads of a block that adds up the experts of a token, eight columns each.
        SUM_THREADS: uint = 128;
    }
    /// Routing of mixtures of experts: a warp a token.
    moe_route {
        /// Threads of a block.
        THREADS: uint = 128;
        /// Threads of a block that also computes logits.
        ROUTER_THREADS: uint = 256;
        /// Rows of the router and tokens of such a block.
        ROUTER_ROWS: uint = 16;
        ROUTER_TOKENS: uint = 8;
    }
    /// Experts for few rows of each.
    moe_gemv {
        /// Maximum number of threads of a block for gates and ups.
        THREADS: uint = 256;
        /// The same for down: a warp an expert, which takes several if a token has more.
        DOWN_THREADS: uint = 512;
        /// Columns of a unit.
        COLUMNS: uint = 128;
        /// Units that a warp has under way at once.
        UNITS: uint = 2;
        /// Rows of weights of a row tile; half as many columns of h.
        ROWS: uint = 16;
    }
    /// Experts for many rows of each by mma.sync.
    moe_mma {
        /// Rows of weights of a tile; half as many columns of h.
        ROWS: uint = 64;
        /// Columns of a step.
        DEPTH: uint = 64;
        /// Steps in shared memory.
        STAGES: int = 4;
        /// Threads of a block.
        THREADS: uint = 128;
    }
    /// Experts for many rows of each by wgmma, on Hopper.
    moe_wgmma {
        /// Rows of weights of an item; half as many columns of h.
        ROWS: uint = 256;
        /// Most pairs of a tile.
        TOKENS: uint = 128;
        /// Steps in shared memory, of 128 bytes of each row.
        STAGES: int = 4;
        /// Threads of a block: a warpgroup that fetches, and two that multiply.
        THREADS: uint = 384;
        /// Shared memory of a block: steps of weights and pairs, lists of two tiles, barriers.
        SHARED_BYTES: uint = STAGES * ((ROWS + TOKENS) * 128 + 4 * TOKENS + 16) + 24 * TOKENS;
    }
    /// Low-rank adapters.
    lora {
        /// Rows of a step of which a block lists those of its adapter.
        ROWS: uint = 128;
        /// Most segments of a projection.
        MAX_SEGMENTS: uint = 4;
        /// Rows of `a` of a block that shrinks.
        SHRINK_ROWS: uint = 16;
        /// Threads of a block that shrinks.
        SHRINK_THREADS: uint = 256;
        /// Columns that a warp has in registers.
        UNIT: uint = 128;
        /// Most splits of the columns.
        MAX_SPLITS: uint = 16;
        /// Threads of a block that expands.
        EXPAND_THREADS: uint = 128;
        /// Columns of a block that expands.
        COLUMNS: uint = 128;
    }
    /// The small ops of DeepSeek-V4.
    deepseek_v4 {
        /// Maximum number of threads of a block that has a row.
        ROW_THREADS: uint = 1024;
        /// Threads of a block that chooses experts.
        ROUTE_THREADS: uint = 256;
        /// Threads of a block with one warp per head.
        HEAD_THREADS: uint = 128;
        /// Largest width of the indexer's heads: a lane has 32 elements.
        MAX_INDEX_DIM: uint = 1024;
        /// Maximum number of threads of a block that rotates the heads of a token.
        ROPE_THREADS: uint = 256;
        /// Maximum number of pairs of a head that are rotated.
        MAX_PAIRS: uint = 512;
    }
    /// The boundary between two blocks of DeepSeek-V4: merge, mix and norm (deepseek_v4/hyper.cu).
    deepseek_v4_hyper {
        /// Columns of every stream that one block multiplies.
        COLUMNS: uint = 64;
        /// Tokens of a tile.
        TILE_TOKENS: uint = 16;
        /// Threads of a block that merges and multiplies.
        THREADS: uint = 128;
        /// Resident blocks of that kernel per multiprocessor.
        BLOCKS: uint = 3;
        /// Floats of a token's partial results of a split.
        STRIDE: uint = 32;
        /// Columns of a warp of the kernel that mixes and normalises.
        NORM_WARP_COLUMNS: uint = 256;
        /// Maximum threads of its blocks: a thread has eight columns, and one warp has none.
        MAX_NORM_THREADS: uint = 1024;
        /// Tokens of a block of the kernel that does Sinkhorn's iteration of many tokens: a lane each.
        MIXING_TOKENS: uint = 32;
        /// Threads of such a block.
        MIXING_THREADS: uint = 256;
    }
    /// The indexer and the attention of DeepSeek-V4.
    deepseek_v4_attention {
        /// Marks an empty place in a list of chosen entries.
        NO_ENTRY: word = u32::MAX;
        /// Neighbouring tokens that one rank chooses entries for, if ranks share the tokens of a step.
        SHARE_TOKENS: uint = 64;
        /// Threads of a block that scores entries.
        SCORE_THREADS: uint = 128;
        /// Threads of a block that chooses entries by their scores.
        CHOOSE_THREADS: uint = 1024;
        /// Largest width of a key.
        MAX_DIM: uint = 512;
        /// Blocks that share an entry of 128 tokens, a warp's channels each.
        POOL_BLOCKS: uint = MAX_DIM / 32;
        /// Dimensions of a warp, for keys in bf16.
        WARP_DIM: uint = 128;
        /// Heads of a block, for keys in bf16.
        MMA_HEADS: uint = 16;
        /// Keys of a list that have a softmax of their own.
        CHUNK: uint = 64;
        /// Shared memory of a block that has a whole list and 16 heads: two tiles of 16 keys, 64 numerators of each of
        /// 128 threads, the warps' parts of two tiles of scores, and codes of two chunks of keys.
        ONE_GROUP_BYTES: uint = 64 * MAX_DIM + 64 * 128 * 4 + 8192 + 8 * CHUNK;
        /// Shared bytes with 32 heads.
        TWO_GROUP_BYTES: uint = 64 * MAX_DIM + 2 * (64 * 128 * 4 + 8192) + 8 * CHUNK;
        /// Threads of a block that merges the softmaxes of a token and head: four dimensions each.
        MERGE_THREADS: uint = MAX_DIM / 4;
        /// Threads of a block for keys in f32, a warp a head.
        F32_THREADS: uint = 256;
    }
    /// Collectives of several GPUs. Status words: the abort word, then one record for each rank: set, op, peer, epoch.
    collectives {
        /// Most GPUs.
        MAX_RANKS: uint = 8;
        /// Maximum number of blocks of a launch; a power of two.
        MAX_BLOCKS: uint = 128;
        /// Threads of a block that waits for flags.
        THREADS: uint = 512;
        /// Threads of a block that waits for words, two each.
        LL_THREADS: uint = 256;
        /// Words of one half of a mailbox, with four bytes of data each: 512 KB.
        LL_WORDS: uint = 4 * LL_THREADS * MAX_BLOCKS;
        /// Bytes in front of the mailboxes of an arena.
        HEADER_BYTES: uint = 256;
        /// Bytes of the flags of a mailbox: two halves of two hops.
        FLAG_BYTES: uint = 2 * 2 * 4 * MAX_BLOCKS;
        /// Flags of one half for parts of rows.
        ROW_FLAGS: uint = 16384;
        /// Bytes of a mailbox without its staging: flags, two halves of words of eight bytes, and flags of rows.
        MAILBOX_BYTES: uint = FLAG_BYTES + 2 * 8 * LL_WORDS + 2 * 4 * ROW_FLAGS;
        /// Maximum number of threads of a block that has rows, one a vector.
        ROW_THREADS: uint = 1024;
        /// Threads of a block that push rows to the peers, next to those that normalise them: a part of a row a warp.
        PUSH_THREADS: uint = 128;
        /// Polls between two looks at the clock and at the abort word.
        POLLS_PER_CHECK: uint = 1024;
        /// Words of a record, and of the abort word.
        RECORD_WORDS: uint = 16;
        /// An op in a record.
        ALL_REDUCE: word = 1;
        /// An op in a record.
        ALL_GATHER: word = 2;
        /// An op in a record.
        REDUCE_SCATTER: word = 3;
        /// An op in a record.
        ALL_GATHER_ROWS: word = 4;
        /// An op in a record.
        REDUCE_ADD_NORM: word = 5;
    }
    /// The GEMMs of DeepSeek-V4.
    deepseek_v4_gemm {
        /// Rows of w of a tile.
        ROWS: uint = 64;
        /// Columns of a step: a scale of a rounded activation, and a block of FP8 weights.
        DEPTH: uint = 128;
        /// Steps in shared memory.
        STAGES: int = 4;
        /// Maximum number of segments of k that are summed for themselves.
        MAX_SEGMENTS: uint = 16;
        /// Threads of a block.
        THREADS: int = 128;
    }
    /// DeepSeek-V4's experts at few tokens.
    deepseek_v4_experts_skinny {
        /// Pairs of a tile.
        PAIRS: uint = 8;
        /// Warpgroups of a block that multiply, each with a warp that fetches for it.
        GROUPS: uint = 4;
        /// Threads of a block.
        THREADS: uint = (128 + 32) * GROUPS;
        /// Maximum number of pairs for which each block lists the tiles itself.
        UNLISTED: uint = 256;
        /// Stages of a warpgroup's ring of weights.
        STAGES: uint = 8;
        /// Bytes of the codes of a stage: 64 rows of 64 bytes.
        STAGE_BYTES: uint = 64 * 64;
    }
    /// The kernels around cuBLASLt in DeepSeek-V4's large-M GEMMs (deepseek_v4/pack.cu).
    deepseek_v4_pack {
        /// Threads of a block.
        THREADS: uint = 256;
    }
    /// Sparse attention at many tokens on Hopper.
    deepseek_v4_attention_wgmma {
        /// Keys of a tile.
        TILE_KEYS: uint = 64;
        /// Threads of a block: a warpgroup that multiplies, and one that fetches.
        THREADS: uint = 256;
        /// Slabs of a tile's keys, 64 dimensions each, in shared memory: more than the eight of a tile, few enough for
        /// two blocks a multiprocessor.
        RING: uint = 9;
        /// Shared memory of a block with 16 heads: queries and weights, the ring, then numbers of each head and key,
        /// and barriers.
        SHARED_BYTES_16: uint = 16 * 9 * 128 + RING * TILE_KEYS * 128 + 2048;
        /// Shared bytes with 32 heads.
        SHARED_BYTES_32: uint = 32 * 9 * 128 + RING * TILE_KEYS * 128 + 2048;
    }
    /// The indexer's scores at many tokens on Hopper.
    deepseek_v4_index_wgmma {
        /// Heads of a query.
        HEADS: uint = 64;
        /// Columns of a head.
        DIM: uint = 128;
        /// Entries of a block.
        TILE_ENTRIES: uint = 256;
        /// Threads of a block: a warp per 16 entries, and one that fetches.
        THREADS: uint = 2 * TILE_ENTRIES + 32;
        /// Queries of tokens that a block has in shared memory.
        SLOTS: uint = 8;
        /// Shared memory of a block.
        SHARED_BYTES: uint = SLOTS * (2 * HEADS * (DIM + 1) + 16);
    }
    /// The routed experts of DeepSeek-V4 at many tokens, on Hopper.
    deepseek_v4_experts_wgmma {
        /// Threads of a block: two warpgroups that multiply, and one that fetches.
        THREADS: uint = 384;
        /// Threads of a block with tiles of at most 48 tokens: four warpgroups that multiply, and one that fetches.
        FEW_THREADS: uint = 640;
        /// Threads of a block that packs activations.
        PACK_THREADS: uint = 256;
        /// Blocks of a cluster: they have the same tokens, and neighbouring rows of weights.
        BLOCKS: uint = 2;
        /// Rows of a box of weights.
        BOX_ROWS: uint = 64;
        /// Tokens of a box of activations.
        BOX_TOKENS: uint = 16;
        /// An expert's list of pairs begins at a multiple of these places: 16 bytes of scales.
        LIST_ALIGN: uint = 4;
        /// Largest k: a row's scales are in shared memory.
        MAX_DEPTH: uint = 4096;
        /// Tokens of a block that adds up the experts of tokens.
        ADD_TOKENS: uint = 8;
        /// Shared memory of a block.
        SHARED_BYTES: uint = 224 << 10;
    }
    /// Logits processors.
    adjust {
        /// Words of a row's span: first edit, end of its edits, mask.
        SPAN_WORDS: uint = 3;
        /// Words of an edit: token, bits of the scale, bits of the addend.
        EDIT_WORDS: uint = 3;
        /// Marks a row without a mask: every token is allowed.
        NO_MASK: word = u32::MAX;
    }
    /// Counts of tokens, and the penalties that depend on them.
    penalties {
        /// Counts of a vector of 16 bytes.
        COUNTS: uint = 8;
        /// Bit of a count that is set if the prompt has the token; the lower bits count generated occurrences.
        IN_PROMPT: word = 1 << 15;
        /// Words of an update: slot, whether it starts, first token, end of the prompt's, end of all.
        UPDATE_WORDS: uint = 5;
        /// Words of a row's penalties: slot, first draft, end of its drafts, bits of presence, frequency, repetition.
        PENALTY_WORDS: uint = 6;
        /// Marks a row without penalties.
        NO_SLOT: word = u32::MAX;
        /// Threads of a block.
        THREADS: uint = 256;
    }
    /// Sampling and log-probabilities.
    sampling {
        /// Threads of a block.
        THREADS: uint = 512;
        /// Maximum number of blocks of a cluster.
        MAX_BLOCKS: uint = 16;
        /// Words of a row's sampling parameters.
        DRAW_WORDS: uint = 8;
        /// Maximum number of tokens with reported log-probabilities.
        MAX_LOGPROBS: uint = 20;
        /// Words of a row's report: log-probability, rank, then ids and log-probabilities of the best tokens.
        REPORT_WORDS: uint = 2 + 2 * MAX_LOGPROBS;
    }
    /// RMS norms.
    norm {
        /// Vectors of 8 elements of a thread.
        VECTORS: int = 2;
        /// Maximum number of threads of a block.
        MAX_THREADS: int = 1024;
    }
    /// The rows of a vision tower.
    vision {
        /// Pixels of a side of a patch.
        PATCH: uint = 16;
        /// Values of a patch: three colours.
        PATCH_VALUES: uint = 3 * PATCH * PATCH;
        /// Copies of a patch's values, for the parts of a weight.
        COPIES: uint = 3;
        /// Threads of a block.
        THREADS: int = 256;
        /// Maximum number of threads of a block of layer norm.
        NORM_THREADS: int = 512;
        /// Vectors of 8 elements of a thread of layer norm.
        NORM_VECTORS: int = 2;
    }
    /// Attention of a vision tower.
    vision_attention {
        /// Queries of a block.
        ROWS: uint = 128;
        /// Keys of a tile.
        TOKENS: uint = 64;
        /// Largest bytes of tiles in shared memory: heads of 128, rows of 17 vectors.
        SHARED_BYTES: uint = (ROWS + 2 * TOKENS) * 17 * 16;
    }
    /// Attention of a vision tower on Hopper.
    vision_attention_wgmma {
        /// Threads of a block that packs keys and values.
        THREADS: uint = 256;
    }
    /// QK norm, rotation and KV write.
    qkv {
        /// Maximum number of threads of a block.
        MAX_THREADS: int = 256;
    }
    /// Projections with gates.
    gated_qkv {
        /// Maximum number of threads of a block.
        MAX_THREADS: int = 256;
        /// Passes over the heads of a token whose loads are issued together.
        PASSES: uint = 6;
        /// Threads of a block of `attention_gate`.
        GATE_THREADS: int = 128;
    }
    /// The plain read of memory.
    read {
        /// Threads of a block.
        THREADS: int = 512;
    }
    /// Segments of a gated delta rule layer.
    segments {
        /// Words of a segment.
        WORDS: uint = 4;
        /// Marks an absent state slot.
        NO_STATE: word = u32::MAX;
    }
    /// The gated delta rule token by token, and the ops around it.
    delta {
        /// Elements of a head.
        DIM: uint = 128;
        /// Width of the convolution.
        WIDTH: uint = 4;
        /// Threads of a block of the convolution.
        CONV_THREADS: uint = 128;
        /// Threads of a block of the recurrence.
        RULE_THREADS: uint = 128;
        /// Blocks that share a head of the recurrence.
        RULE_PARTS: uint = 2;
        /// Threads of a block of the fused decode step.
        DECODE_THREADS: uint = 2 * DIM;
        /// Threads of a block of the gated norm.
        NORM_THREADS: int = 256;
    }
    /// The gated delta rule in chunks.
    delta_chunks {
        /// Tokens of a chunk.
        CHUNK: uint = 64;
        /// Threads of a block of the intra-chunk kernel.
        THREADS: int = 128;
        /// Most value heads per key head.
        GROUP: uint = 4;
        /// Bytes that the inter-chunk scan needs of a chunk and head.
        INTRA_CHUNK_BYTES: uint = 11_024;
        /// Threads of a block of the scan by mma.sync.
        MMA_SCAN_THREADS: uint = 128;
        /// Bytes of its shared memory.
        MMA_SCAN_BYTES: uint = 97_920;
        /// Rows of a head's state that it has.
        MMA_SCAN_ROWS: uint = 32;
        /// Threads of a block of the scan by wgmma.
        WGMMA_SCAN_THREADS: uint = 384;
        /// Bytes of its shared memory.
        WGMMA_SCAN_BYTES: uint = 208_272;
        /// Rows of a head's state that it has.
        WGMMA_SCAN_ROWS: uint = 64;
    }
    /// Attention.
    attention {
        /// Warps of a block of decode attention.
        DECODE_WARPS: int = 4;
        /// Maximum of queries times heads of a group of a sequence in decode attention.
        DECODE_ROWS: uint = 16;
        /// Head sizes above it have stages of keys or values in decode attention, not of both, and keep queries in registers
        /// in prefill attention by mma.sync.
        LARGE_HEAD: int = 128;
    }
    /// Prefill attention by mma.sync.
    prefill_mma {
        /// Rows of queries of a tile.
        ROWS: uint = 128;
        /// Tokens of a KV tile.
        TOKENS: uint = 64;
    }
    /// Prefill attention by wgmma.
    prefill_wgmma {
        /// Threads of a warpgroup.
        WARPGROUP: int = 128;
        /// Consumer warpgroups.
        CONSUMERS: int = 2;
        /// Rows of queries of a tile.
        ROWS: uint = 64 * CONSUMERS;
        /// Maximum bytes of barriers and tiles in shared memory.
        BARRIER_BYTES: uint = 1024;
        /// Bytes of shared memory for heads of 64: KV tiles, tiles of queries, barriers.
        SHARED_64: uint = (8 * 128 + 2 * 128) * 64 * 2 + BARRIER_BYTES;
        /// Shared bytes for heads of 128.
        SHARED_128: uint = (5 * 128 + 2 * 128) * 128 * 2 + BARRIER_BYTES;
        /// Shared bytes for heads of 256.
        SHARED_256: uint = (4 * 80 + 128) * 256 * 2 + BARRIER_BYTES;
    }
    /// Widening of an FP8 KV cache for prefill.
    widen_kv {
        /// Threads of a block.
        THREADS: uint = 256;
    }
    /// Large-M GEMM by mma.sync.
    gemm_mma {
        /// Columns of a step: 64 bytes of a row.
        DEPTH: int = 32;
        /// Steps in shared memory.
        STAGES: int = 4;
        /// Threads of a block.
        THREADS: int = 256;
    }
    /// GEMMs with a weight of few rows.
    narrow_gemm {
        /// Threads of a block.
        THREADS: uint = 256;
        /// Rows of x of a block.
        ROWS: uint = 16;
        /// Rows of w of a block.
        COLUMNS: uint = 8;
    }
    /// Large-M GEMMs by wgmma with an epilogue.
    gemm_wgmma {
        /// Rows of x of a tile.
        ROWS: uint = 128;
        /// Rows of w of a tile.
        WEIGHTS: uint = 256;
        /// Columns of a box: 128 bytes, the span of the swizzle.
        BOX: uint = 64;
        /// Rows of results that a warp stores at once.
        STORE_ROWS: uint = 16;
        /// Steps of `BOX` columns in shared memory.
        STAGES: int = 4;
        /// Consumer warpgroups.
        CONSUMERS: int = 2;
        /// Consumer warps.
        WARPS: uint = 4 * CONSUMERS;
        /// Threads of a block.
        THREADS: uint = (1 + CONSUMERS) * 128;
        /// Bytes of shared memory: steps of x and w, results of each warp, two barriers a step.
        SHARED_BYTES: uint = (STAGES * (ROWS + WEIGHTS) + WARPS * 2 * STORE_ROWS) * BOX * 2 + STAGES * 16;
        /// Number of parts in which SwiGLU is computed.
        SWIGLU_PARTS: int = 8;
        /// Number of parts in which a tile with a bias is finished.
        BIAS_PARTS: int = 8;
    }
    /// Skinny GEMM by mma.sync.
    gemv_splitk {
        /// Most warps of a block.
        MAX_WARPS: int = 12;
        /// Steps of weights in a warp's ring.
        RING: int = 3;
        /// Groups of 32 columns in a step.
        GROUPS: uint = 4;
        /// Columns of a step.
        STEP: uint = 32 * GROUPS;
        /// Steps of a chunk of x.
        CHUNK: uint = 2;
    }
    /// Skinny GEMM by wgmma.
    skinny_wgmma {
        /// Most consumer warpgroups.
        MAX_WARPGROUPS: int = 2;
        /// Producer threads.
        FETCHERS: int = 64;
        /// Boxes of 64 columns of a step.
        BOXES: int = 2;
        /// Warps that round a single row of x, instead of one that fetches it rounded.
        ROUNDERS: int = 4;
    }
    /// Weights of four bits.
    int4 {
        /// Threads of a block of the kernels that pack or widen them.
        THREADS: uint = 256;
    }
    /// Skinny GEMM with weights of four bits by mma.sync, on Hopper.
    skinny_int4 {
        /// Most warps of a block that multiply.
        MMA_WARPS: int = 15;
        /// Columns of a slot.
        COLUMNS: uint = 256;
    }
    /// Skinny GEMM with group-quantised weights.
    skinny_groups {
        /// Warps of a block, for up to 8, 16 and 32 rows of x: with more rows a warp needs more registers.
        WARPS_8: uint = 16;
        WARPS_16: uint = 12;
        WARPS_32: uint = 8;
    }
    /// Packed group-quantised weights.
    pack_groups {
        /// Threads of a block of the kernels that pack or widen them.
        THREADS: uint = 256;
    }
    /// Group-quantised weights in the order of checkpoints.
    groups {
        /// Threads of a block of the kernel that widens them.
        THREADS: uint = 256;
        /// Numbers of the layouts of scales.
        PLAIN_F16: word = 0;
        PLAIN_BF16: word = 1;
        PLAIN_F32: word = 2;
        /// Added to a plain layout whose groups have zero points.
        WITH_ZERO: word = 4;
        /// Added to a plain layout whose groups have minima.
        WITH_MIN: word = 8;
        K4: word = 16;
        K6: word = 17;
        XS: word = 18;
        E4M3: word = 19;
        E8M0: word = 20;
        /// Numbers of the meanings of codes.
        CENTRED: word = 0;
        UNSIGNED: word = 1;
        IQ4: word = 2;
        E2M1: word = 3;
        CODE_E4M3: word = 4;
    }
    /// FP8 with f32 scales.
    fp8 {
        /// Edge of a block of weights, and columns of a block of activations.
        BLOCK: uint = 128;
        /// Rows of activations passed to the library are a multiple of this number.
        ROW_ALIGNMENT: uint = 4;
        /// Threads of a block that rounds a block of weights.
        WEIGHT_THREADS: uint = 512;
        /// Threads of a block that rounds activations.
        ACTIVATION_THREADS: uint = 128;
        /// Blocks of columns that a warp rounds.
        ACTIVATION_BLOCKS: uint = 8;
        /// Threads of a block that widens weights.
        WIDEN_THREADS: uint = 256;
    }
    /// All layers of a decode step in one kernel.
    decode_layers {
        /// Elements of a head.
        HEAD: int = 128;
        /// Elements of a row of the residual stream that a block adds to.
        MAX_OWN: uint = 64;
        /// Consumer warps of a block.
        WARPS: int = 8;
        /// Producer warps.
        PRODUCERS: uint = 4;
        /// Threads of the consumer warps.
        CONSUMERS: uint = 32 * WARPS;
        /// Rows of a stage.
        STAGE_ROWS: uint = 8;
        /// Maximum number of columns of a stage.
        STAGE_COLUMNS: uint = 1280;
        /// Bytes of a row of a stage, chosen so that two rows have different banks.
        PITCH: uint = 2 * STAGE_COLUMNS + 64;
        /// Bytes of a stage.
        STAGE_BYTES: uint = STAGE_ROWS * PITCH;
        /// Most stages.
        MAX_STAGES: uint = 16;
        /// Padding bytes after each row of x.
        INPUT_PAD: uint = 64;
        /// Bytes of attention's shared memory.
        ATTENTION_BYTES: uint = 64 * HEAD * WARPS + 20 * HEAD + 128;
    }
}

/// The text of `limits.h`.
#[allow(dead_code, reason = "for the build script and a test")]
pub fn header() -> String {
    let mut text = "// From src/limits.rs.\n#pragma once\n#include <cstdint>\n".to_owned();
    for (module, limits) in LIMITS {
        text += &format!("namespace limits::{module} {{\n");
        for (c_type, name, value) in *limits {
            let words = name.split('_').map(|word| word[..1].to_owned() + &word[1..].to_lowercase());
            let (name, c_type) = (words.collect::<String>(), if *c_type == "int" { "int" } else { "uint32_t" });
            let suffix = if c_type == "int" { "" } else { "u" };
            text += &format!("constexpr {c_type} k{name} = {value}{suffix};\n");
        }
        text += "}\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_limits_by_their_c_names() {
        let header = header();
        for line in [
            "namespace limits::norm {\nconstexpr int kVectors = 2;\nconstexpr int kMaxThreads = 1024;\n}",
            "constexpr uint32_t kNoSlot = 4294967295u;",
            "constexpr uint32_t kIntraChunkBytes = 11024u;",
        ] {
            assert!(header.contains(line), "{line} in {header}");
        }
    }

    #[test]
    fn marks_are_those_of_core() {
        assert_eq!(kv_cache::NO_SLOT, pegainfer_core::kv::NO_SLOT);
        assert_eq!(gather::PLACEHOLDER, pegainfer_core::schedule::PLACEHOLDER);
        assert_eq!(segments::NO_STATE, pegainfer_core::schedule::NO_STATE);
        assert_eq!(segments::WORDS, pegainfer_core::schedule::SEGMENT_WORDS);
        assert_eq!(sampling::MAX_LOGPROBS, pegainfer_core::engine::MAX_LOGPROBS);
    }
}
