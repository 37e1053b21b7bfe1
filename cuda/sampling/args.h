// What a call of `rwkv_sample` gets, for any C++ compiler.
#pragma once

#include <cstdint>

namespace rwkv {

// How a row's token is found; callers ask for the codes by name (`rwkv_sample_method`).
enum Method : int { GREEDY = 0, PLAIN = 1, JOINT = 2, SEQUENTIAL = 3, GUMBEL = 4, NOISE = 5, REJECTION = 6 };
constexpr const char* METHOD_NAMES[] = {"greedy", "plain", "joint", "sequential", "gumbel", "noise", "rejection"};

// Pointers are on the device; [S] by slot, [B] by row, U columns. sampling/kernel.py fills one in; what it
// believes of the layout is checked by `rwkv_sample_args_size` when the kernels are loaded, and field by field in its test.
struct SampleArgs {
    const void* logits;  // [B, U], rows `stride` elements apart
    int64_t stride;
    int32_t type;         // Type
    int32_t num_rows;     // B
    int32_t num_columns;  // U
    int32_t bias_width;   // pairs for which a slot has room in bias_columns and bias_values
    const int64_t* slots;      // [B], -1 = padding: the row is skipped
    const int64_t* ids;        // [U] column -> token id, or null: column j is token first_id + j
    int64_t first_id;
    const int32_t* mask_lines;  // [S] the line of mask_words that says what a slot's row may sample, -1: every column
    const uint8_t* mask_words;  // [S, 4 ceil(U / 32)] bit j % 8 of byte j / 8: column j may be sampled
    const int32_t* method;     // [S] Method
    const float* temperature;  // [S]
    const int32_t* top_k;      // [S] 1 .. U
    const float* top_p;        // [S] > 0, +inf = off
    const float* min_p_depth;  // [S] columns further below the largest value are not sampled, +inf = off
    const float* alpha_presence;   // [S]
    const float* alpha_frequency;  // [S]
    const float* alpha_decay;      // [S]
    const float* repetition;       // [S] values of columns in `seen` above 0 are divided by it, others multiplied; 1 = off
    const float* noise;            // [S]
    const bool* penalized;         // [S]
    const int64_t* seed;           // [S]
    const int64_t* choice;         // [S]
    int64_t* step;                 // [S], counted up here
    const int64_t* first_end;      // [S]: the end token, column 0 when it is id 0, is masked before this step
    const int64_t* bias_columns;   // [S, bias_width]
    const float* bias_values;      // [S, bias_width]
    const int32_t* num_bias;       // [S] pairs in use
    float* penalties;         // [S, U] as of the step before, without its token; rows 16-byte aligned, padded with zeros to
    int64_t penalty_stride;   // a multiple of 8 columns, this many elements apart
    uint32_t* touched;        // [S, ceil(U / 256)] bit i: of columns 8 i .. 8 i + 7 some have a penalty or are in `seen`
    int32_t* pending_column;  // [S] the column sampled in the step before, -1 = none
    float* pending_penalty;   // [S] what that adds to it
    uint8_t* seen;            // [S, 4 ceil(U / 32)] bit j % 8 of byte j / 8: column j has occurred, where repetition is not 1
    int64_t* out_ids;    // [B]
    bool* out_finite;    // [B]
    int64_t* last_ids;   // [S] the same by slot, or null
    float* out_boundary;  // [B, 3] for tests, or null: boundary value, weight of columns equal to it, sum of kept weights;
                          // written for rows whose boundary is looked for, JOINT and SEQUENTIAL
};

}  // namespace rwkv
