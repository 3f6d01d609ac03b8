//! The parameters of every kernel in csrc/, in order, listed only here.
//!
//! `IMAGE: Arguments [entry points] { parameters }`: `GEMM_FP8` is the image of csrc/gemm/fp8.cu, and all entry points of a list have the
//! same parameters. An element `T` is the one behind the entry point's name. With `as Struct` the kernel takes one
//! parameter, a struct of the same name in CUDA whose members take eight bytes each.
//!
//! | parameter | in CUDA | in Rust |
//! |---|---|---|
//! | `In<E>` | `const E *` | tensor that is read |
//! | `Out<E>` | `E *` | tensor that is written |
//! | `Alias<E>` | `E *` | tensor that is read, or whose writes the launcher declares |
//! | `OutOrScratch<E>` | `E *` | tensor that is written, or address in the workspace |
//! | `Scratch<E>`, `ScratchIn<E>` | `E *`, `const E *` | address in the workspace |
//! | `Map<E>` | `const __grid_constant__ TensorMap` | tensor map, before all other parameters |
//! | `u32`, `u64`, `f32` | `uint32_t`, `uint64_t`, `float` | number |

kernels! {
    ROWS_ADJUST: Adjust [adjust] { logits: Out<F32>, spans: In<U32>, edits: In<U32>, masks: In<U32>, vocab: u32 }

    ATTENTION_DECODE_ASYNC: DecodeAsync [
        decode_64<Bf16>, decode_128<Bf16>, decode_256<Bf16>, decode_fp8_64<U8>, decode_fp8_128<U8>, decode_fp8_256<U8>
    ] {
        q: In<Bf16>, k: In<T>, v: In<T>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>,
        out: Out<Bf16>, heads: u32, max_blocks: u32, blocks: u32, scale: f32, partials: Scratch<F32>, max_rows: u32,
    }
    ATTENTION_DECODE_ASYNC: CombineSplits [combine_64, combine_128, combine_256] {
        partials: ScratchIn<F32>, qo_indptr: In<U32>, out: Out<Bf16>, heads: u32, splits: u32,
    }
    ATTENTION_DECODE_BULK: DecodeBulk [
        decode_64_1<Bf16>, decode_64_2<Bf16>, decode_128_1<Bf16>, decode_128_2<Bf16>, decode_256_1<Bf16>,
        decode_256_2<Bf16>, decode_fp8_64_1<U8>, decode_fp8_64_2<U8>, decode_fp8_128_1<U8>, decode_fp8_128_2<U8>,
        decode_fp8_256_1<U8>, decode_fp8_256_2<U8>
    ] {
        q: In<Bf16>, k: Alias<T>, v: Alias<T>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>,
        out: Out<Activation>, padded: u32, heads: u32, rows: u32, max_blocks: u32, blocks: u32, overlapped: u32, scale: f32,
        partials: Scratch<F32>, arrived: Scratch<U32>,
    }
    ATTENTION_DECODE_BULK: DecodeFused [
        decode_fused_64_2<Bf16>, decode_fused_128_2<Bf16>, decode_fused_128_3<Bf16>, decode_fused_fp8_64_4<U8>,
        decode_fused_fp8_128_3<U8>
    ] {
        qkv: In<Bf16>, q_norm: In<Bf16>, k_norm: In<Bf16>, rope: In<F32>, slots: In<U32>, k: Out<T>, v: Out<T>,
        qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>, out: Out<Activation>, padded: u32, heads: u32, rows: u32,
        max_blocks: u32, blocks: u32, positions: u32, eps: f32, scale: f32, partials: Scratch<F32>,
        arrived: Scratch<U32>,
    }
    ATTENTION_DECODE_GATED: GatedDecode [
        gated_decode_256_3<Bf16>, gated_decode_256_4<Bf16>, gated_decode_fp8_256_3<U8>, gated_decode_fp8_256_4<U8>
    ] {
        projected: In<Bf16>, q_norm: In<F32>, k_norm: In<F32>, rope: In<F32>, rope_positions: In<U32>, slots: In<U32>,
        k: Out<T>, v: Out<T>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>, out: Out<Activation>,
        padded: u32, heads: u32, rows: u32, max_blocks: u32, blocks: u32, positions: u32, rotary: u32, eps: f32, scale: f32,
        partials: Scratch<F32>, arrived: Scratch<U32>,
    }
    ATTENTION_PREFILL_MMA: PrefillMma [
        prefill_mma_64<Bf16>, prefill_mma_128<Bf16>, prefill_mma_256<Bf16>, prefill_mma_fp8_64<U8>,
        prefill_mma_fp8_128<U8>, prefill_mma_fp8_256<U8>
    ] {
        q: In<Bf16>, k: In<T>, v: In<T>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>,
        out: Out<Bf16>, heads: u32, kv_heads: u32, rows: u32, max_blocks: u32, blocks: u32, scale: f32,
    }
    ATTENTION_PREFILL_WGMMA: PrefillWidened [prefill_widened_64, prefill_widened_128, prefill_widened_256] {
        q: In<Bf16>, k: ScratchIn<Bf16>, v: ScratchIn<Bf16>, qo_indptr: In<U32>, kv_lens: In<U32>, out: Out<Activation>,
        padded: u32, heads: u32, kv_heads: u32, rows: u32, first_head: u32, heads_here: u32, capacity: u32, scale: f32,
    }
    ATTENTION_WIDEN_KV: WidenKv [widen_kv_64, widen_kv_128, widen_kv_256] {
        k: In<U8>, v: In<U8>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>, out_k: Scratch<Bf16>,
        out_v: Scratch<Bf16>, heads: u32, kv_heads: u32, rows: u32, max_blocks: u32, blocks: u32, first_head: u32,
        heads_here: u32, capacity: u32,
    }
    ATTENTION_PREFILL_WGMMA: PrefillWgmma [prefill_64, prefill_128, prefill_256] {
        q: In<Bf16>, k: In<Bf16>, v: In<Bf16>, qo_indptr: In<U32>, kv_lens: In<U32>, block_tables: In<U32>,
        out: Out<Activation>, padded: u32, heads: u32, kv_heads: u32, rows: u32, max_blocks: u32, blocks: u32, scale: f32,
    }

    DELTA_RULE_CAUSAL_CONV: CausalConv [causal_conv1d_4, causal_conv1d_16] {
        projected: In<Bf16>, weight: In<F32>, segments: In<U32>, conv_states: Out<Bf16>, out: Out<Bf16>,
        channels: u32, width: u32, tokens: u32, count: u32, slots: u32,
    }
    LAYERS_DECODE: Step as Step [
        decode_layers_1_3072, decode_layers_2_3072, decode_layers_1_4096, decode_layers_2_4096
    ] {
        layers: In<Layer>, final_norm: In<Bf16>, rope: In<F32>, slots: In<U32>, qo_indptr: In<U32>, kv_lens: In<U32>,
        block_tables: In<U32>, residual: Out<Bf16>, normed: Out<Bf16>, epochs: Scratch<U32>, flagged: Scratch<U64>,
        partials: Scratch<F32>, arrived: Scratch<U32>, n_layers: u32, hidden: u32, heads: u32, kv_heads: u32,
        intermediate: u32, positions: u32, max_blocks: u32, blocks: u32, stages: u32, eps: f32, scale: f32,
    }

    COLLECTIVES_PUSH: AllReduce [
        all_reduce_ll_f32_2<F32>, all_reduce_ll_bf16_2<Bf16>, all_reduce_one_shot_f32_2<F32>,
        all_reduce_one_shot_bf16_2<Bf16>, all_reduce_two_shot_f32_2<F32>, all_reduce_two_shot_bf16_2<Bf16>,
        all_reduce_ll_f32_4<F32>, all_reduce_ll_bf16_4<Bf16>, all_reduce_one_shot_f32_4<F32>,
        all_reduce_one_shot_bf16_4<Bf16>, all_reduce_two_shot_f32_4<F32>, all_reduce_two_shot_bf16_4<Bf16>,
        all_reduce_ll_f32_8<F32>, all_reduce_ll_bf16_8<Bf16>, all_reduce_one_shot_f32_8<F32>,
        all_reduce_one_shot_bf16_8<Bf16>, all_reduce_two_shot_f32_8<F32>, all_reduce_two_shot_bf16_8<Bf16>,
    ] {
        x: Out<T>, first: u64, vectors: u32, rank: u32, ranks: u32, arena: Scratch<U64>, to_0: Scratch<U64>,
        to_1: Scratch<U64>, to_2: Scratch<U64>, to_3: Scratch<U64>, to_4: Scratch<U64>, to_5: Scratch<U64>,
        to_6: Scratch<U64>, to_7: Scratch<U64>, stage_bytes: u32, status: Scratch<U32>, timeout: u64,
    }
    COLLECTIVES_PUSH: ExchangeParts [
        reduce_scatter_f32_2<F32>, reduce_scatter_bf16_2<Bf16>, all_gather_rows_f32_2<F32>, all_gather_rows_bf16_2<Bf16>,
        reduce_scatter_f32_4<F32>, reduce_scatter_bf16_4<Bf16>, all_gather_rows_f32_4<F32>, all_gather_rows_bf16_4<Bf16>,
        reduce_scatter_f32_8<F32>, reduce_scatter_bf16_8<Bf16>, all_gather_rows_f32_8<F32>, all_gather_rows_bf16_8<Bf16>,
    ] {
        x: Out<T>, part: u32, first: u32, count: u32, alone: u32, rank: u32, ranks: u32, arena: Scratch<U64>,
        to_0: Scratch<U64>, to_1: Scratch<U64>, to_2: Scratch<U64>, to_3: Scratch<U64>, to_4: Scratch<U64>,
        to_5: Scratch<U64>, to_6: Scratch<U64>, to_7: Scratch<U64>, stage_bytes: u32, status: Scratch<U32>, timeout: u64,
    }
    COLLECTIVES_PUSH: AllGather [all_gather_columns_2, all_gather_columns_4, all_gather_columns_8] {
        part: In<F32>, whole: Out<F32>, first: u32, rows: u32, width: u32, rank: u32, ranks: u32,
        arena: Scratch<U64>, to_0: Scratch<U64>, to_1: Scratch<U64>, to_2: Scratch<U64>, to_3: Scratch<U64>,
        to_4: Scratch<U64>, to_5: Scratch<U64>, to_6: Scratch<U64>, to_7: Scratch<U64>, stage_bytes: u32,
        status: Scratch<U32>, timeout: u64,
    }

    COLLECTIVES_ADD_NORM: ReduceAddNorm [
        reduce_add_norm_ll_bf16_2<Bf16>, reduce_add_norm_ll_f32_2<F32>, reduce_add_norm_rows_bf16_2<Bf16>,
        reduce_add_norm_rows_f32_2<F32>, reduce_add_norm_ll_bf16_4<Bf16>, reduce_add_norm_ll_f32_4<F32>,
        reduce_add_norm_rows_bf16_4<Bf16>, reduce_add_norm_rows_f32_4<F32>, reduce_add_norm_ll_bf16_8<Bf16>,
        reduce_add_norm_ll_f32_8<F32>, reduce_add_norm_rows_bf16_8<Bf16>, reduce_add_norm_rows_f32_8<F32>,
    ] {
        partial: In<Bf16>, residual: Out<Bf16>, weight: In<T>, out: Out<Activation>, padded: u32, hidden: u32, eps: f32,
        first: u32, rows: u32, rank: u32, ranks: u32, arena: Scratch<U64>, to_0: Scratch<U64>, to_1: Scratch<U64>,
        to_2: Scratch<U64>, to_3: Scratch<U64>, to_4: Scratch<U64>, to_5: Scratch<U64>, to_6: Scratch<U64>,
        to_7: Scratch<U64>, stage_bytes: u32, status: Scratch<U32>, timeout: u64,
    }

    DEEPSEEK_V4_DUMMY: RandomCodes [random_codes] {
        out: Out<U8>, seed: u64, elements: u64, width: u32, whole: u64, first_row: u64, first_column: u64, mask: u32,
        add: u32,
    }
    DEEPSEEK_V4_DUMMY: RandomNumbers [random_numbers_bf16<Bf16>, random_numbers_f32<F32>] {
        out: Out<T>, seed: u64, elements: u64, width: u32, whole: u64, first_row: u64, first_column: u64, limit: f32,
    }
    LORA_ADAPTERS: LoraShrink [lora_shrink] {
        x: In<Bf16>, a: In<Bf16>, slots: In<U32>, sums: Scratch<F32>, begin: u32, end: u32, k: u32, n: u32,
        adapters: u32, split_columns: u32,
    }
    LORA_ADAPTERS: LoraExpand [lora_expand] {
        sums: ScratchIn<F32>, b: In<Bf16>, slots: In<U32>, out: Out<Bf16>, begin_row: u32, end_row: u32, width: u32,
        rank: u32, adapters: u32, splits: u32, segments: u32, end0: u32, end1: u32, end2: u32, end3: u32,
    }
    MOE_ROUTE: MoeRoute [moe_route_128, moe_route_256, moe_route_512, moe_route_1024] {
        logits: In<F32>, chosen: Out<U32>, weights: Out<F32>, tokens: u32, rows: u32, experts: u32, k: u32,
        normalize: u32, shared: u32,
    }
    MOE_ROUTE: MoeRouter [moe_router_128, moe_router_256, moe_router_512, moe_router_1024] {
        x: In<Bf16>, w: In<Bf16>, logits: Out<F32>, chosen: Out<U32>, weights: Out<F32>, counters: Scratch<U32>,
        tokens: u32, columns: u32, rows: u32, experts: u32, k: u32, normalize: u32, shared: u32,
    }
    MOE_PAIRS: MoeGroupPairs [moe_group_pairs] {
        chosen: ScratchIn<U32>, pairs: OutOrScratch<U32>, tiles: Scratch<U32>, count: u32, first: u32, experts: u32,
        tokens: u32,
    }
    MOE_PAIRS: MoeAddPairs [moe_add_pairs] {
        y: ScratchIn<Bf16>, chosen: ScratchIn<U32>, out: OutOrScratch<Bf16>, hidden: u32, from: u32,
        columns: u32, k: u32, first: u32, experts: u32,
    }
    MOE_GEMV: MoeGateUpGemv [moe_gate_up_gemv_bf16<Bf16>, moe_gate_up_gemv_fp8<U8>] {
        x: In<Bf16>, w: In<T>, scales: ScratchIn<F32>, chosen: In<U32>, weights: In<F32>, h: Scratch<Bf16>,
        experts_of_token: u32, width: u32, k: u32, splits: u32,
    }
    MOE_GEMV: MoeDownGemv [moe_down_gemv_bf16<Bf16>, moe_down_gemv_fp8<U8>] {
        h: ScratchIn<Bf16>, w: In<T>, scales: ScratchIn<F32>, chosen: In<U32>, out: Out<Bf16>, experts_of_token: u32,
        hidden: u32, k: u32,
    }
    MOE_MMA: MoeGateUpMma [
        moe_gate_up_mma_bf16_16<Bf16>, moe_gate_up_mma_bf16_32<Bf16>, moe_gate_up_mma_bf16_64<Bf16>,
        moe_gate_up_mma_fp8_16<U8>, moe_gate_up_mma_fp8_32<U8>, moe_gate_up_mma_fp8_64<U8>,
    ] {
        x: ScratchIn<Bf16>, w: In<T>, scales: ScratchIn<F32>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>,
        weights: ScratchIn<F32>, h: Scratch<Bf16>, experts_of_token: u32, width: u32, k: u32,
    }
    MOE_MMA: MoeDownMma [
        moe_down_mma_bf16_16<Bf16>, moe_down_mma_bf16_32<Bf16>, moe_down_mma_bf16_64<Bf16>,
        moe_down_mma_fp8_16<U8>, moe_down_mma_fp8_32<U8>, moe_down_mma_fp8_64<U8>,
    ] {
        h: ScratchIn<Bf16>, w: In<T>, scales: ScratchIn<F32>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>,
        y: Scratch<Bf16>, hidden: u32, from: u32, columns: u32, k: u32,
    }
    MOE_WGMMA: MoeGateUpWgmma [moe_gate_up_wgmma_bf16] {
        w: Map<Bf16>, x: ScratchIn<Bf16>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, weights: ScratchIn<F32>,
        h: Scratch<Bf16>, experts_of_token: u32, width: u32, k: u32,
    }
    MOE_WGMMA: MoeGateUpWgmmaFp8 [moe_gate_up_wgmma_fp8] {
        w: Map<U8>, scales: In<F32>, x: ScratchIn<U8>, x_scales: ScratchIn<F32>, tiles: ScratchIn<U32>,
        pairs: ScratchIn<U32>, weights: ScratchIn<F32>, h: Scratch<U8>, h_scales: Scratch<F32>, padded: u32,
        pitch: u32, experts_of_token: u32, width: u32, k: u32,
    }
    MOE_WGMMA: MoeDownWgmma [moe_down_wgmma_bf16] {
        w: Map<Bf16>, h: ScratchIn<Bf16>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, y: Scratch<Bf16>, hidden: u32,
        from: u32, columns: u32, k: u32,
    }
    MOE_WGMMA: MoeDownWgmmaFp8 [moe_down_wgmma_fp8] {
        w: Map<U8>, scales: In<F32>, h: ScratchIn<U8>, h_scales: ScratchIn<F32>, tiles: ScratchIn<U32>,
        pairs: ScratchIn<U32>, y: Scratch<Bf16>, pitch: u32, hidden: u32, from: u32, columns: u32, k: u32,
    }
    EXPERTS_MMA: GroupPairs [group_pairs] {
        chosen: ScratchIn<U32>, pairs: OutOrScratch<U32>, tiles: Scratch<U32>, count: u32, first: u32, experts: u32,
        tokens: u32,
    }
    EXPERTS_MMA: GateUp [
        gate_up_bf16_8<Bf16>, gate_up_bf16_16<Bf16>, gate_up_bf16_32<Bf16>, gate_up_bf16_64<Bf16>,
        gate_up_fp8_8<U8>, gate_up_fp8_16<U8>, gate_up_fp8_32<U8>, gate_up_fp8_64<U8>,
        gate_up_fp4_8<U8>, gate_up_fp4_16<U8>, gate_up_fp4_32<U8>, gate_up_fp4_64<U8>,
    ] {
        x: ScratchIn<Bf16>, gate: In<T>, up: In<T>, gate_scales: ScratchIn<U8>, up_scales: ScratchIn<U8>,
        tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, weights: ScratchIn<F32>, out: Scratch<void>, low: Scratch<Bf16>,
        counters: Scratch<U32>, tokens: u32, experts_of_token: u32, width: u32, k: u32, planes: u32, plane: u64,
        limit: f32, to_f32: u32,
    }
    EXPERTS_MMA: Down [
        down_bf16_8<Bf16>, down_bf16_16<Bf16>, down_bf16_32<Bf16>, down_bf16_64<Bf16>,
        down_fp8_8<U8>, down_fp8_16<U8>, down_fp8_32<U8>, down_fp8_64<U8>,
        down_fp4_8<U8>, down_fp4_16<U8>, down_fp4_32<U8>, down_fp4_64<U8>,
    ] {
        h: ScratchIn<Bf16>, w: In<T>, scales: ScratchIn<U8>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>,
        out: Scratch<void>, tokens: u32, hidden: u32, k: u32, planes: u32, plane: u64, to_f32: u32,
    }
    EXPERTS_MMA: AddPairs [add_pairs_bf16<Bf16>, add_pairs_f32<F32>] {
        y: ScratchIn<T>, chosen: ScratchIn<U32>, shared: ScratchIn<T>, out: OutOrScratch<T>, hidden: u32, k: u32,
        first: u32, experts: u32,
    }
    EXPERTS_SKINNY: SkinnyGateUp [experts_gate_up] {
        gate: Map<U8>, up: Map<U8>, shared_gate: Map<U8>, shared_up: Map<U8>, x: In<U8>, gate_scales: ScratchIn<U8>,
        up_scales: ScratchIn<U8>, shared_gate_scales: ScratchIn<U8>, shared_up_scales: ScratchIn<U8>,
        chosen: In<U32>, weights: In<F32>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, h: Scratch<Bf16>,
        tokens: u32, experts_of_token: u32, first: u32, experts: u32, has_shared: u32, width: u32, k: u32, limit: f32,
    }
    EXPERTS_SKINNY: SkinnyDown [experts_down] {
        w: Map<U8>, shared_w: Map<U8>, h: ScratchIn<Bf16>, scales: ScratchIn<U8>, shared_scales: ScratchIn<U8>,
        chosen: In<U32>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, y: Scratch<Bf16>, tokens: u32,
        experts_of_token: u32, first: u32, experts: u32, has_shared: u32, hidden: u32, k: u32,
    }
    EXPERTS_SKINNY: AddExperts [experts_add] {
        y: ScratchIn<Bf16>, chosen: In<U32>, out: Out<Bf16>, tokens: u32, hidden: u32, k: u32, first: u32,
        experts: u32, shared: u32,
    }
    EXPERTS_WGMMA: GroupPlaces [group_places] {
        chosen: ScratchIn<U32>, pairs: OutOrScratch<U32>, places: Scratch<U32>, tiles: Scratch<U32>, count: u32, first: u32,
        experts: u32, tokens: u32,
    }
    EXPERTS_WGMMA: PackTokens [pack_tokens] {
        x: ScratchIn<Bf16>, chosen: ScratchIn<U32>, places: ScratchIn<U32>, codes: OutOrScratch<U8>, scales: Scratch<F32>,
        vectors: u32, k: u32, pitch: u32, experts_of_token: u32, first: u32, experts: u32,
    }
    EXPERTS_WGMMA: PackPlaces [pack_places] {
        h: ScratchIn<Bf16>, tiles: ScratchIn<U32>, codes: OutOrScratch<U8>, scales: Scratch<F32>, k: u32, pitch: u32,
    }
    EXPERTS_WGMMA: GateUpWgmma [gate_up_wgmma_48, gate_up_wgmma_96, gate_up_wgmma_128] {
        gate: Map<U8>, up: Map<U8>, x: Map<U8>, x_scales: ScratchIn<F32>, gate_scales: ScratchIn<U8>,
        up_scales: ScratchIn<U8>, tiles: ScratchIn<U32>, pairs: ScratchIn<U32>, weights: ScratchIn<F32>,
        out: Scratch<Bf16>, width: u32, k: u32, pitch: u32, limit: f32,
    }
    EXPERTS_WGMMA: DownWgmma [down_wgmma_48, down_wgmma_96, down_wgmma_128] {
        w: Map<U8>, h: Map<U8>, h_scales: ScratchIn<F32>, scales: ScratchIn<U8>, tiles: ScratchIn<U32>,
        pairs: ScratchIn<U32>, out: Scratch<Bf16>, hidden: u32, k: u32, pitch: u32, first: u32, columns: u32,
    }
    EXPERTS_WGMMA: AddColumns [add_columns] {
        y: ScratchIn<Bf16>, chosen: ScratchIn<U32>, shared: ScratchIn<Bf16>, out: OutOrScratch<Bf16>, tokens: u32,
        hidden: u32, k: u32, first: u32, experts: u32, first_column: u32, columns: u32,
    }
    DEEPSEEK_V4_GEMM: Planes [planes] {
        x: ScratchIn<F32>, out: OutOrScratch<Bf16>, elements: u32, plane: u64, planes: u32,
    }
    DEEPSEEK_V4_GEMM: Dsv4Gemm [
        dsv4_gemm_bf16_8<Bf16>, dsv4_gemm_bf16_16<Bf16>, dsv4_gemm_bf16_32<Bf16>, dsv4_gemm_bf16_64<Bf16>,
        dsv4_gemm_fp8_8<U8>, dsv4_gemm_fp8_16<U8>, dsv4_gemm_fp8_32<U8>, dsv4_gemm_fp8_64<U8>,
        dsv4_gemm_fp4_8<U8>, dsv4_gemm_fp4_16<U8>, dsv4_gemm_fp4_32<U8>, dsv4_gemm_fp4_64<U8>,
    ] {
        x: ScratchIn<Bf16>, w: In<T>, scales: ScratchIn<U8>, out: Scratch<void>, partials: Scratch<F32>,
        counters: Scratch<U32>, m: u32, n: u32, k: u32, stride: u32, group_rows: u32, planes: u32, plane: u64,
        segments: u32, steps: u32, to_f32: u32,
    }
    DEEPSEEK_V4_HYPER: HyperMergeProducts [hyper_merge_products] {
        f: In<Bf16>, post: In<F32>, comb: In<F32>, streams: Out<Bf16>, function: In<F32>, partial: Scratch<F32>,
        first: u32, tokens: u32, hidden: u32,
    }
    DEEPSEEK_V4_HYPER: HyperMixNorm [hyper_mix_norm] {
        streams: In<Bf16>, partial: Scratch<F32>, base: In<F32>, scale: In<F32>, weight: In<Bf16>, post: Out<F32>,
        comb: Out<F32>, out: Out<Bf16>, low: OutOrScratch<Bf16>, packed: OutOrScratch<U8>, first: u32, hidden: u32,
        iters: u32, eps: f32,
        streams_eps: f32, norm_eps: f32,
    }
    DEEPSEEK_V4_HYPER: HyperOutputMixing [hyper_output_mixing] {
        partial: ScratchIn<F32>, post: Out<F32>, comb: Out<F32>, first: u32, tokens: u32, hidden: u32, iters: u32, eps: f32,
    }
    DEEPSEEK_V4_NORM: Dsv4Norm [dsv4_norm_bf16<Bf16>, dsv4_norm_f32<F32>] {
        x: In<T>, weight: In<Bf16>, out: Out<T>, low: OutOrScratch<T>, packed: OutOrScratch<U8>, hidden: u32, eps: f32,
    }
    DEEPSEEK_V4_NORM: InterleavedRope [interleaved_rope_bf16<Bf16>, interleaved_rope_f32<F32>] {
        x: Out<T>, positions: In<U32>, frequencies: In<F32>, heads: u32, dim: u32, pairs: u32, inverse: u32,
    }
    DEEPSEEK_V4_PACK: PackActivations [pack_activations] {
        x: ScratchIn<Bf16>, codes: OutOrScratch<U8>, scales: Scratch<F32>, first: ScratchIn<U8>, second: ScratchIn<U8>,
        weight_scales: Scratch<F32>, each: u32, m: u32, padded: u32, k: u32,
    }
    DEEPSEEK_V4_PACK: PackSwiglu [pack_swiglu] {
        gate: ScratchIn<Bf16>, up: ScratchIn<Bf16>, codes: OutOrScratch<U8>, scales: Scratch<F32>,
        down_scales: ScratchIn<U8>, weight_scales: Scratch<F32>, each: u32, m: u32, width: u32, pitch: u32, limit: f32,
    }
    DEEPSEEK_V4_PACK: WidenE8m0 [widen_e8m0] {
        codes: In<U8>, scales: ScratchIn<U8>, out: OutOrScratch<Bf16>, first: u32, rows: u32, k: u32,
    }
    DEEPSEEK_V4_QUANT: RoundActivation [round_activation_bf16<Bf16>, round_activation_f32<F32>] { x: Out<T>, groups: u32 }
    DEEPSEEK_V4_ROUTE: RouteLearned [route_learned] {
        logits: In<F32>, bias: In<F32>, experts: Out<U32>, weights: Out<F32>, count: u32, k: u32, scale: f32,
    }
    DEEPSEEK_V4_ROUTE: RouteHash [route_hash] {
        logits: In<F32>, table: In<U32>, ids: In<U32>, experts: Out<U32>, weights: Out<F32>, vocab: u32, count: u32,
        k: u32, scale: f32,
    }
    DEEPSEEK_V4_SKINNY: SkinnyPacked [
        skinny_packed_8, skinny_packed_16, skinny_packed_32, skinny_split_8, skinny_split_16,
    ] {
        x: ScratchIn<U8>, w: In<U8>, scales: ScratchIn<U8>, out: Scratch<void>, m: u32, n: u32, k: u32,
        group_rows: u32, splits: u32, to_f32: u32,
    }
    DEEPSEEK_V4_SKINNY: SkinnyExact [skinny_exact_8, skinny_exact_16, skinny_exact_32] {
        x: In<Bf16>, w: In<Bf16>, out: Scratch<void>, m: u32, n: u32, k: u32, stride: u32, group_rows: u32,
        splits: u32, to_f32: u32,
    }
    DEEPSEEK_V4_SKINNY: SkinnyProject [skinny_project_8, skinny_project_16, skinny_project_32] {
        x: In<Bf16>, packed: In<U8>, w0: In<U8>, scales0: ScratchIn<U8>, w1: In<U8>, scales1: ScratchIn<U8>,
        w2: ScratchIn<Bf16>, w3: ScratchIn<Bf16>, w4: ScratchIn<Bf16>, w5: ScratchIn<Bf16>, w6: ScratchIn<Bf16>,
        out0: Out<Bf16>, out1: Out<Bf16>, out2: Scratch<F32>, out3: Scratch<F32>, out4: Scratch<F32>,
        out5: Scratch<F32>, out6: Scratch<Bf16>, m: u32, k: u32, splits: u32, n0: u32, n1: u32, n2: u32, n4: u32,
        n6: u32,
    }
    DEEPSEEK_V4_SKINNY: PackRows [pack_rows, pack_split_rows] {
        x: In<Bf16>, out: OutOrScratch<U8>, rows: u32, k: u32,
    }
    DEEPSEEK_V4_STREAMS: Dsv4Embed [dsv4_embed_bf16<Bf16>, dsv4_embed_f32<F32>] {
        ids: In<U32>, table: In<Bf16>, out: Out<T>, first: u32, rows: u32, hidden: u32,
    }
    DEEPSEEK_V4_STREAMS: ExpandStreams [expand_streams_bf16<Bf16>, expand_streams_f32<F32>] {
        x: In<T>, streams: Out<T>, hidden: u32,
    }
    DEEPSEEK_V4_STREAMS: PickRows [pick_rows_bf16<Bf16>, pick_rows_f32<F32>] {
        x: In<T>, rows: In<U32>, out: Out<T>, tokens: u32, width: u32,
    }
    DEEPSEEK_V4_STREAMS: ResolveIds [resolve_ids] {
        previous: In<U32>, ids: Out<U32>, samples: u32, count: u32,
    }
    DEEPSEEK_V4_STREAMS: MeanStreams [mean_streams_bf16<Bf16>, mean_streams_f32<F32>] {
        streams: In<T>, out: Out<T>, hidden: u32, pitch: u32, column: u32,
    }
    DEEPSEEK_V4_STREAMS: AddF32 [add_f32] {
        x: In<F32>, out: Out<F32>, elements: u32,
    }
    DEEPSEEK_V4_STREAMS: HyperMerge [hyper_merge_bf16<Bf16>, hyper_merge_f32<F32>] {
        f: In<T>, post: In<F32>, comb: In<F32>, streams: Out<T>, hidden: u32,
    }
    DEEPSEEK_V4_STREAMS: HyperHead [hyper_head_bf16<Bf16>, hyper_head_f32<F32>] {
        streams: In<T>, function: In<F32>, base: In<F32>, scale: In<F32>, out: Out<T>, hidden: u32, eps: f32,
        norm_eps: f32,
    }
    DEEPSEEK_V4_STREAMS: HyperMixF32 [hyper_mix_f32] {
        streams: In<F32>, function: In<F32>, base: In<F32>, scale: In<F32>, mixed: Out<F32>, post: Out<F32>,
        comb: Out<F32>, hidden: u32, iters: u32, eps: f32, norm_eps: f32,
    }

    DEEPSEEK_V4_RINGS: WriteRing [write_ring_bf16<Bf16>, write_ring_f32<F32>] {
        fresh: In<T>, qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>, page_tables: In<U32>, rings: Out<T>,
        rows: u32, pages: u32, slot_count: u32, ring: u32, width: u32,
    }
    DEEPSEEK_V4_RINGS: CopySlots [copy_slots] {
        rings: In<U32>, from: u32, to: u32,
    }
    DEEPSEEK_V4_LATENTS: AttentionLatents [attention_latents_bf16<Bf16>, attention_latents_f32<F32>] {
        x: In<T>, weight: In<Bf16>, out: Out<T>, low: OutOrScratch<T>, packed: OutOrScratch<U8>, keys: In<T>,
        key_weight: In<Bf16>, kv: Out<T>, frequencies: In<F32>, qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>,
        page_tables: In<U32>, values: ScratchIn<F32>, scores: ScratchIn<F32>, bias: ScratchIn<F32>,
        entry_norm: ScratchIn<Bf16>, value_rings: ScratchIn<F32>, score_rings: ScratchIn<F32>, entries: Scratch<T>,
        index_values: ScratchIn<F32>, index_scores: ScratchIn<F32>, index_bias: ScratchIn<F32>,
        index_norm: ScratchIn<Bf16>, index_value_rings: ScratchIn<F32>, index_score_rings: ScratchIn<F32>,
        index_entries: Scratch<T>, channels: Scratch<F32>, arrived: Scratch<U32>, tokens: u32, hidden: u32, dim: u32, pairs: u32,
        rows: u32, pages: u32, slot_count: u32, entry_pages: u32, ratio: u32, ring: u32, width: u32, index_pages: u32,
        index_ratio: u32, index_ring: u32, index_width: u32, index_dim: u32, low_precision: u32, eps: f32,
    }
    DEEPSEEK_V4_QUERIES: AttentionQueries [attention_queries_bf16<Bf16>, attention_queries_f32<F32>] {
        q: Out<T>, index_q: OutOrScratch<T>, frequencies: In<F32>, qo_indptr: In<U32>, positions: In<U32>,
        slots: In<U32>, values: ScratchIn<F32>, scores: ScratchIn<F32>, bias: ScratchIn<F32>, value_rings: Scratch<F32>,
        score_rings: Scratch<F32>, index_values: ScratchIn<F32>, index_scores: ScratchIn<F32>,
        index_bias: ScratchIn<F32>, index_value_rings: Scratch<F32>, index_score_rings: Scratch<F32>, heads: u32,
        dim: u32, index_heads: u32, index_dim: u32, pairs: u32, rows: u32, slot_count: u32, ratio: u32, ring: u32,
        width: u32, index_ratio: u32, index_ring: u32, index_width: u32, low_precision: u32, eps: f32,
    }
    DEEPSEEK_V4_INDEX: IndexScores [index_scores_bf16<Bf16>, index_scores_f32<F32>] {
        q: In<T>, weights: In<T>, entries: In<T>, qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>,
        page_tables: In<U32>, scores: Scratch<F32>, rows: u32, pages: u32, entry_pages: u32, ratio: u32, heads: u32,
        dim: u32, k: u32, first_own: u32, rank: u32, ranks: u32, most: u32,
    }
    DEEPSEEK_V4_INDEX_WGMMA: IndexScoresWgmma [index_scores_wgmma] {
        q: Map<Bf16>, weights: In<Bf16>, entries: In<Bf16>, qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>,
        page_tables: In<U32>, scores: Scratch<F32>, rows: u32, pages: u32, entry_pages: u32, ratio: u32, k: u32,
        first_own: u32, rank: u32, ranks: u32, tokens: u32, tile: u32, most: u32,
    }
    DEEPSEEK_V4_INDEX: ChooseEntries [choose_entries, choose_entries_8, choose_entries_40] {
        scores: ScratchIn<F32>, qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>, page_tables: In<U32>,
        chosen: Out<U32>, rows: u32, pages: u32, ratio: u32, k: u32, first_own: u32, rank: u32, ranks: u32, most: u32,
    }
    DEEPSEEK_V4_ATTENTION: SparseAttention [
        sparse_attention_heads_16<Bf16>, sparse_attention_heads_32<Bf16>, sparse_attention_f32<F32>
    ] {
        q: In<T>, kv: In<T>, rings: In<T>, entries: In<T>, chosen: In<U32>, sink: In<F32>, qo_indptr: In<U32>,
        positions: In<U32>, slots: In<U32>, page_tables: In<U32>, out: Out<T>, rows: u32, pages: u32, slot_count: u32,
        window: u32, ring: u32, entry_pages: u32, per_page: u32, k: u32, heads: u32, dim: u32, scale: f32,
    }
    DEEPSEEK_V4_ATTENTION_WGMMA: AttentionWgmma [sparse_attention_wgmma_16, sparse_attention_wgmma_32] {
        q: Map<Bf16>, out: Map<Bf16>, kv: In<Bf16>, rings: In<Bf16>, entries: In<Bf16>, chosen: In<U32>, sink: In<F32>,
        qo_indptr: In<U32>, positions: In<U32>, slots: In<U32>, page_tables: In<U32>, rows: u32, pages: u32,
        slot_count: u32, window: u32, ring: u32, entry_pages: u32, per_page: u32, k: u32, scale: f32,
    }
    DEEPSEEK_V4_ATTENTION_CHUNKS: AttentionChunks [sparse_attention_chunks] {
        q: In<Bf16>, kv: In<Bf16>, rings: In<Bf16>, entries: In<Bf16>, chosen: In<U32>, qo_indptr: In<U32>,
        positions: In<U32>, slots: In<U32>, page_tables: In<U32>, partials: Scratch<F32>, rows: u32, pages: u32,
        slot_count: u32, window: u32, ring: u32, entry_pages: u32, per_page: u32, k: u32, heads: u32, dim: u32,
        scale: f32,
    }
    DEEPSEEK_V4_ATTENTION_CHUNKS: MergeChunks [sparse_attention_merge] {
        partials: ScratchIn<F32>, sink: In<F32>, frequencies: In<F32>, kv: In<Bf16>, qo_indptr: In<U32>,
        positions: In<U32>, slots: In<U32>, out: Out<Bf16>, packed: OutOrScratch<U8>, rings: Out<Bf16>, rows: u32,
        slot_count: u32, window: u32, ring: u32, per_page: u32, k: u32, heads: u32, dim: u32, chunks: u32, pairs: u32,
        group: u32,
    }

    DELTA_RULE_DECODE: DecodeDelta [decode_delta] {
        projected: In<Bf16>, conv: In<F32>, a_log: In<F32>, dt_bias: In<F32>, norm: In<F32>, segments: In<U32>,
        states: Out<F32>, conv_states: Out<Bf16>, out: Out<Activation>, padded: u32, counters: Scratch<U32>, key_heads: u32,
        output_group: u32, slots: u32, eps: f32,
    }
    DELTA_RULE_RECURRENT: DeltaRecurrent [delta_recurrent] {
        mixed: In<Bf16>, projected: In<Bf16>, a_log: In<F32>, dt_bias: In<F32>, segments: In<U32>, states: Out<F32>,
        out: Out<F32>, key_heads: u32, width: u32, tokens: u32, slots: u32, longest: u32,
    }
    DELTA_RULE_INTRA: DeltaIntra [gated_delta_intra] {
        mixed: In<Bf16>, projected: In<Bf16>, a_log: In<F32>, dt_bias: In<F32>, segments: In<U32>,
        parts: Out<IntraChunk>, tokens: u32, count: u32, key_heads: u32, value_heads: u32, longest: u32,
    }
    DELTA_RULE_SCAN: DeltaScan [gated_delta_scan_mma, gated_delta_scan_wgmma] {
        mixed: In<Bf16>, parts: In<IntraChunk>, segments: In<U32>, states: Out<F32>, out: Out<F32>, tokens: u32,
        slots: u32, count: u32, key_heads: u32, value_heads: u32,
    }
    DELTA_RULE_GATED_NORM: GatedRmsNorm [gated_rms_norm] {
        x: In<F32>, projected: In<Bf16>, weight: In<F32>, out: Out<Activation>, padded: u32, tokens: u32, heads: u32,
        group: u32, gate: u32, width: u32, eps: f32,
    }
    ATTENTION_GATED_QKV: GatedQkv [
        gated_qk_norm_rope_write_kv<Bf16>, gated_qk_norm_rope_write_kv_fp8<U8>, gated_qk_norm_rope_write_kv_grid<Bf16>,
        gated_qk_norm_rope_write_kv_grid_fp8<U8>
    ] {
        projected: In<Bf16>, q_norm: In<F32>, k_norm: In<F32>, rope: In<F32>, positions: In<U32>, slots: In<U32>,
        q: Out<Bf16>, k: Out<T>, v: Out<T>, heads: u32, kv_heads: u32, head_dim: u32, rotary: u32,
        max_position: u32, max_slot: u32, eps: f32, lanes: u32,
    }
    ATTENTION_GATED_QKV: AttentionGate [attention_gate] {
        projected: In<Bf16>, attended: Out<Bf16>, heads: u32, kv_heads: u32, head_dim: u32,
    }
    ATTENTION_QKV: Qkv [qk_norm_rope_write_kv<Bf16>, qk_norm_rope_write_kv_fp8<U8>] {
        qkv: In<Bf16>, q_norm: In<Bf16>, k_norm: In<Bf16>, rope: In<F32>, positions: In<U32>, slots: In<U32>,
        q: Out<Bf16>, k: Out<T>, v: Out<T>, heads: u32, kv_heads: u32, head_dim: u32, max_position: u32,
        max_slot: u32, eps: f32, lanes: u32,
    }
    ATTENTION_QKV: RopeKv [rope_write_kv<Bf16>, rope_write_kv_fp8<U8>] {
        qkv: In<Bf16>, rope: In<F32>, positions: In<U32>, slots: In<U32>, q: Out<Bf16>, k: Out<T>, v: Out<T>,
        heads: u32, kv_heads: u32, head_dim: u32, max_position: u32, max_slot: u32, lanes: u32,
    }

    GEMM_MMA: GemmMma [gemm_mma_bf16_64<Bf16>, gemm_mma_bf16_128<Bf16>, gemm_mma_f32_64<F32>, gemm_mma_f32_128<F32>] {
        x: In<Bf16>, w: ScratchIn<Bf16>, out: OutOrScratch<T>, m: u32, n: u32, k: u32, pitch: u32,
    }
    GEMM_NARROW: NarrowGemm [narrow_gemm] { x: In<Bf16>, w: In<Bf16>, out: OutOrScratch<Bf16>, m: u32, k: u32, pitch: u32 }
    GEMM_WGMMA_SWIGLU: GemmWgmmaSwiglu [gemm_wgmma_swiglu] {
        x: Map<Bf16>, w: Map<Bf16>, out: Map<Bf16>, m: u32, width: u32, k: u32, group: u32,
    }
    GEMM_WGMMA_BIAS: GemmWgmmaBias [
        linear_bias, linear_bias_residual, linear_bias_gelu_tanh, linear_bias_gelu_erf
    ] {
        x: Map<Bf16>, w: Map<Bf16>, out: Map<Bf16>, values: ScratchIn<Bf16>, bias: In<F32>, m: u32, width: u32, k: u32,
        group: u32,
    }
    GEMM_GEMV_SPLITK: GemvSplitK [
        gemv_splitk_bf16_8<Bf16>, gemv_splitk_bf16_16<Bf16>, gemv_splitk_f32_8<F32>, gemv_splitk_f32_16<F32>,
        gemv_splitk_gated_8<Bf16>, gemv_splitk_gated_16<Bf16>
    ] {
        x: In<Bf16>, w: In<Bf16>, out: OutOrScratch<T>, m: u32, n: u32, k: u32, pitch: u32, slice: u32, slots: u32,
    }
    GEMM_SKINNY_WGMMA: SkinnyWgmma [
        skinny_wgmma_bf16_32<Bf16>, skinny_wgmma_bf16_64<Bf16>, skinny_wgmma_bf16_96<Bf16>,
        skinny_wgmma_f32_32<F32>, skinny_wgmma_f32_64<F32>, skinny_wgmma_f32_96<F32>,
        skinny_wgmma_gated_32<Bf16>, skinny_wgmma_gated_64<Bf16>, skinny_wgmma_gated_96<Bf16>,
        skinny_wgmma_logits_32<F32>, skinny_wgmma_logits_64<F32>, skinny_wgmma_logits_96<F32>
    ] {
        x: Map<Bf16>, w: Map<Bf16>, out: OutOrScratch<T>, m: u32, n: u32, k: u32, pitch: u32, slice: u32, rows: u32,
        passes: u32, slots: u32, x_slots: u32, ahead: u32,
    }
    GEMM_SKINNY_WGMMA_FP8: SkinnyWgmmaFp8 [
        skinny_fp8_bf16_32<Bf16>, skinny_fp8_bf16_64<Bf16>, skinny_fp8_f32_32<F32>, skinny_fp8_f32_64<F32>,
        skinny_fp8_f32_96<F32>, skinny_fp8_f32_128<F32>,
        skinny_fp8_gated_32<Bf16>, skinny_fp8_gated_64<Bf16>
    ] {
        x: Map<U8>, w: Map<U8>, x_scales: ScratchIn<F32>, scales: In<F32>, out: OutOrScratch<T>, scale_rows: u32,
        m: u32, n: u32, k: u32, pitch: u32, slice: u32, rows: u32, passes: u32, slots: u32, x_slots: u32, ahead: u32,
    }
    GEMM_SKINNY_WGMMA_FP8: SkinnyRounding [
        skinny_rounding_bf16_32<Bf16>, skinny_rounding_f32_32<F32>, skinny_rounding_gated_32<Bf16>
    ] {
        w: Map<U8>, x: In<Bf16>, scales: In<F32>, out: OutOrScratch<T>, m: u32, n: u32, k: u32, pitch: u32, slice: u32,
        rows: u32, passes: u32, slots: u32, x_slots: u32, ahead: u32,
    }
    GEMM_SKINNY_INT4: SkinnyInt4 [
        skinny_int4_bf16_64<Bf16>, skinny_int4_bf16_128<Bf16>, skinny_int4_f32_64<F32>, skinny_int4_f32_128<F32>,
        skinny_int4_gated_64<Bf16>
    ] {
        x: Map<Bf16>, w: Map<U8>, scales: In<U8>, out: OutOrScratch<T>, zeros: u64, group_shift: u32, f16: u32, m: u32,
        n: u32, k: u32, pitch: u32, slice: u32, rows: u32, passes: u32, slots: u32, x_slots: u32, ahead: u32,
    }
    GEMM_SKINNY_INT4_MMA: SkinnyInt4Mma [
        skinny_int4_mma_bf16_8<Bf16>, skinny_int4_mma_bf16_16<Bf16>, skinny_int4_mma_bf16_32<Bf16>,
        skinny_int4_mma_f32_8<F32>, skinny_int4_mma_f32_16<F32>, skinny_int4_mma_f32_32<F32>,
        skinny_int4_mma_gated_8<Bf16>, skinny_int4_mma_gated_16<Bf16>, skinny_int4_mma_gated_32<Bf16>
    ] {
        x: Map<Bf16>, w: Map<U8>, scales: In<U8>, out: OutOrScratch<T>, zeros: u64, group_shift: u32, f16: u32, m: u32,
        n: u32, k: u32, pitch: u32, slice: u32, rows: u32, passes: u32, strips: u32, parts: u32, slots: u32, ahead: u32,
    }
    GEMM_SKINNY_GROUPS: SkinnyGroups [
        skinny_int4_wide_8, skinny_int4_wide_16, skinny_int4_wide_32,
        skinny_int4_plain_8, skinny_int4_plain_16, skinny_int4_plain_32,
        skinny_int4_zero_8, skinny_int4_zero_16, skinny_int4_zero_32,
        skinny_int4_min_8, skinny_int4_min_16, skinny_int4_min_32,
        skinny_int4_k_8, skinny_int4_k_16, skinny_int4_k_32,
        skinny_int5_plain_8, skinny_int5_plain_16, skinny_int5_plain_32,
        skinny_int5_min_8, skinny_int5_min_16, skinny_int5_min_32,
        skinny_int5_k_8, skinny_int5_k_16, skinny_int5_k_32,
        skinny_int6_k_8, skinny_int6_k_16, skinny_int6_k_32,
        skinny_int8_plain_8, skinny_int8_plain_16, skinny_int8_plain_32,
        skinny_iq4_plain_8, skinny_iq4_plain_16, skinny_iq4_plain_32,
        skinny_iq4_xs_8, skinny_iq4_xs_16, skinny_iq4_xs_32,
        skinny_e2m1_e4m3_8, skinny_e2m1_e4m3_16, skinny_e2m1_e4m3_32,
        skinny_e2m1_e8m0_8, skinny_e2m1_e8m0_16, skinny_e2m1_e8m0_32,
        skinny_e4m3_wide_8, skinny_e4m3_wide_16, skinny_e4m3_wide_32,
    ] {
        x: In<Bf16>, codes: In<U8>, scales: In<U8>, out: OutOrScratch<Result>, extra: u64, dtype: u32, group_shift: u32,
        m: u32, n: u32, k: u32, pitch: u32, slice: u32, chunk: u32, slots: u32, output: u32,
    }
    GEMM_PACK_GROUPS: PackCodes [pack_codes] { codes: Out<U8>, n: u32, k: u32, bits: u32, is_integer: u32 }
    GEMM_PACK_GROUPS: PackScales [pack_scales] {
        from: In<U8>, to: Out<U8>, extra: u64, kind: u32, n: u32, k: u32, pitch: u32, group: u32,
    }
    GEMM_PACK_GROUPS: TransposeScales [transpose_scales] {
        from: In<U8>, to: Out<U8>, to_first: u64, n: u32, groups: u32, pitch: u32, first: u32, bytes: u32,
    }
    GEMM_PACK_GROUPS: ExpandScales [expand_scales] { from: In<F32>, to: Out<U8>, n: u32, blocks: u32 }
    GEMM_PACK_GROUPS: WidenPacked [
        widen_int4_plain, widen_int4_zero, widen_int4_min, widen_int4_k, widen_int5_plain, widen_int5_min,
        widen_int5_k, widen_int6_k, widen_int8_plain, widen_iq4_plain, widen_iq4_xs, widen_e2m1_e4m3,
        widen_e2m1_e8m0, widen_e4m3_wide,
    ] {
        codes: In<U8>, scales: In<U8>, out: Scratch<Bf16>, extra: u64, dtype: u32, group_shift: u32, n: u32, k: u32,
        first: u32, rows: u32,
    }
    GEMM_INT4: WidenInt4 [widen_int4] {
        codes: In<U8>, scales: In<U8>, out: Scratch<Bf16>, zeros: u64, group_shift: u32, f16: u32, n: u32, k: u32,
        first: u32, rows: u32,
    }
    GEMM_INT4: WidenInt4ToFp8 [widen_int4_fp8] {
        codes: In<U8>, scales: In<U8>, out: Scratch<U8>, out_scales: Scratch<F32>, zeros: u64, group_shift: u32, f16: u32,
        n: u32, k: u32, first: u32, rows: u32,
    }
    GEMM_GROUPS: WidenGroups [widen_groups] {
        codes: In<U8>, scales: In<U8>, out: Scratch<Bf16>, values: u32, bits: u32, kind: u32, group: u32, k: u32,
        code_pitch: u32, scale_pitch: u32, first: u32, rows: u32,
    }
    ROWS_DUMMY: RandomBytes [random_bytes] { out: Out<U8>, seed: u64, words: u64, mask: u32 }
    GEMM_FP8: QuantizeWeights [quantize_weights] { w: In<Bf16>, codes: Out<U8>, scales: Out<F32>, n: u32, k: u32 }
    GEMM_FP8: QuantizeActivations [quantize_activations_2, quantize_activations_8] {
        x: In<Bf16>, codes: Scratch<U8>, scales: Scratch<F32>, first: u32, m: u32, padded: u32, k: u32,
    }
    GEMM_FP8: WidenWeights [widen_weights] {
        codes: In<U8>, scales: In<F32>, out: Scratch<Bf16>, first: u32, rows: u32, k: u32,
    }

    ROWS_GATHER: Gather [gather] { from: In<Bf16>, ids: In<U32>, out: Out<Bf16>, from_rows: u32, width: u32 }
    ROWS_GATHER: Embedding [embedding] {
        table: In<Bf16>, ids: In<U32>, previous: In<U32>, out: Out<Bf16>, vocab: u32, previous_rows: u32, width: u32,
    }
    ROWS_NORM: RmsNorm [rms_norm<Bf16>, rms_norm_f32<F32>] {
        x: In<Bf16>, weight: In<T>, out: Out<Activation>, padded: u32, hidden: u32, eps: f32,
    }
    ROWS_NORM: AddRmsNorm [add_rms_norm<Bf16>, add_rms_norm_f32<F32>] {
        x: In<Bf16>, residual: Out<Bf16>, weight: In<T>, out: Out<Activation>, padded: u32, hidden: u32, eps: f32,
    }
    ROWS_NORM: AddPartialsRmsNorm [add_slices_rms_norm<Bf16>, add_slices_rms_norm_f32<F32>] {
        partials: ScratchIn<F32>, residual: Out<Bf16>, weight: In<T>, out: Out<Activation>, padded: u32, hidden: u32, eps: f32,
        count: u32,
    }
    ROWS_SWIGLU: Swiglu [swiglu] { gate_up: In<Bf16>, out: Out<Activation>, padded: u32, width: u32 }

    ROWS_PACK: Pack [pack, unpack] {
        parts: In<U32>, packed: Out<U8>, rows: In<U32>, sums: Scratch<U64>, totals: Scratch<U64>, pitch: u32,
    }
    ROWS_PENALTIES: CountTokens [count_tokens] {
        counts: Out<U32>, updates: In<U32>, tokens: In<U32>, sampled: In<U32>, words: u32, vocab: u32, samples: u32,
    }
    ROWS_PENALTIES: Penalize [penalize] {
        logits: Out<F32>, counts: In<U32>, penalties: In<U32>, drafts: In<U32>, vocab: u32, words: u32,
    }
    ROWS_SAMPLE: Sample [sample] { logits: In<F32>, draws: In<U32>, out: Out<U32>, vocab: u32 }
    ROWS_LOGPROBS: Logprobs [logprobs] { logits: In<F32>, draws: In<U32>, tokens: In<U32>, out: Out<U32>, vocab: u32 }

    ROWS_DUMMY: Uniform [uniform] { out: Out<Bf16>, seed: u64, groups: u32, limit: f32 }
    ROWS_READ: ReadAll [read_all] { data: In<Bf16>, out: Out<Bf16>, vectors: u32 }
    ROWS_WRITE_RUNS: WriteRuns [write_runs] { runs: In<U32>, words: In<U32>, out: Out<U32>, word_count: u32, elements: u32 }

    VISION_ROWS: UnfoldPatches [unfold_patches] { pixels: In<U8>, patches: In<U32>, out: Out<Bf16>, bytes: u32 }
    VISION_ROWS: AddPositions [add_positions] {
        table: In<Bf16>, rows: In<U32>, weights: In<F32>, x: Out<Bf16>, positions: u32, hidden: u32,
    }
    VISION_ROWS: LayerNorm [layer_norm] {
        x: In<Bf16>, weight: In<F32>, bias: In<F32>, out: Out<Bf16>, hidden: u32, eps: f32,
    }
    VISION_ROWS: AfterSums [add_bias, add_bias_residual, bias_gelu_tanh, bias_gelu_erf] {
        x: In<F32>, bias: In<F32>, out: Out<Bf16>, width: u32,
    }
    VISION_ROWS: CopyRows [copy_rows] { from: In<Bf16>, to: Out<Bf16>, start: u32, first: u32, hidden: u32 }
    VISION_ROWS: RotateGrid [rotate_grid] {
        table: In<F32>, positions: In<U32>, qkv: Out<Bf16>, heads: u32, half: u32, sides: u32,
    }
    VISION_ATTENTION: SegmentAttention [segment_attention_64, segment_attention_80, segment_attention_128] {
        qkv: In<Bf16>, indptr: In<U32>, out: Out<Bf16>, segments: u32, heads: u32, head_dim: u32, scale: f32,
    }
    VISION_ATTENTION_WGMMA: PackGrid [pack_grid_64, pack_grid_128] {
        table: In<F32>, positions: In<U32>, slots: In<U32>, qkv: In<Bf16>, q: Scratch<Bf16>, k: Scratch<Bf16>,
        v: Scratch<Bf16>, heads: u32, head_dim: u32, sides: u32, capacity: u32,
    }
    VISION_ATTENTION_WGMMA: AttendGrid [attend_grid_64, attend_grid_128] {
        q: ScratchIn<Bf16>, k: ScratchIn<Bf16>, v: ScratchIn<Bf16>, indptr: In<U32>, out: Out<Bf16>, segments: u32,
        heads: u32, head_dim: u32, capacity: u32, scale: f32,
    }
}

// A row of the table of layers that `Step` points to.
pointers! {
    LAYERS_DECODE: Layer {
        input_norm: In<Bf16>, qkv: In<Bf16>, q_norm: In<Bf16>, k_norm: In<Bf16>, k: Alias<Bf16>, v: Alias<Bf16>,
        o: In<Bf16>, post_norm: In<Bf16>, gate_up: In<Bf16>, down: In<Bf16>,
    }
}
