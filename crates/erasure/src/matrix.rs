//! The parity matrix, and the coefficients that express any shard through any `k` others.
//!
//! Parity shard `i` is the sum over data shards `j` of `PARITY[i][j]` times data shard `j`. One matrix serves every
//! geometry: a k+m code uses its first `m` rows and first `k` columns. It follows that a code with fewer data shards is
//! the longer one with zeroes in the missing shards, and that more parity never changes the parity already there.
//!
//! The matrix is Cauchy's, `1 / (x_i + y_j)` with `x_i = 16 + i` and `y_j = j` (plus is exclusive or), whose columns and
//! then rows are scaled so that the first row and the first column are ones:
//!
//! ```text
//! PARITY[i][j] = (x_0 + y_j)(x_i + y_0) / ((x_i + y_j)(x_0 + y_0))
//! ```
//!
//! Why any `k` shards suffice: all `x` and `y` are distinct, so every square submatrix of Cauchy's matrix is invertible;
//! scaling rows and columns by non-zero factors keeps it so. Losing `r` data shards leaves `r` equations from `r` parity
//! rows in the `r` missing columns, which is such a submatrix.
//!
//! Invariants
//! 1. The first row is all ones: one parity shard is the exclusive or of the data. The first column is all ones: a 1+m
//!    code is m + 1 plain copies.
//! 2. Every `k` shards of every k+m code determine all others (checked over all 2^16 choices of survivors for each k).
//! 3. The matrix never changes: it is part of the on-disk format (golden vectors in `tests/golden.rs`).

use crate::gf::{inverse, mul};

/// Shards a code may have in all. Bounds the tables and every array on the stack; 16 fault domains are more than one
/// segment is ever spread over.
pub const SHARDS_MAX: usize = 16;

/// Rows and columns of [`PARITY`]: the other side of a code has one shard at least.
const SIDE_MAX: usize = SHARDS_MAX - 1;

/// Data shards that can be missing at once: as many parity shards stand in for them, and 8 + 8 is [`SHARDS_MAX`].
const MISSING_MAX: usize = SHARDS_MAX / 2;

/// Coefficients of one output, one per source; entries past the sources are zero.
pub(crate) type Row = [u8; SHARDS_MAX];

/// The coefficients of parity shard `i` are `PARITY[i]`.
pub(crate) static PARITY: [Row; SIDE_MAX] = {
    let mut rows = [[0; SHARDS_MAX]; SIDE_MAX];
    let mut i = 0;
    while i < SIDE_MAX {
        let mut j = 0;
        while j < SIDE_MAX {
            let column_scale = mul(cauchy_divisor(0, j), inverse(cauchy_divisor(0, 0)));
            rows[i][j] = mul(mul(column_scale, cauchy_divisor(i, 0)), inverse(cauchy_divisor(i, j)));
            j += 1;
        }
        i += 1;
    }
    rows
};

/// `x_i + y_j`.
const fn cauchy_divisor(i: usize, j: usize) -> u8 {
    (SHARDS_MAX + i) as u8 ^ j as u8
}

/// What data shard `column` contributes to shard `index` of a code with `data_shards`: the generator matrix, of which
/// the data shards' part is the identity.
fn contribution(data_shards: usize, index: usize, column: usize) -> u8 {
    match index.checked_sub(data_shards) {
        None => u8::from(index == column),
        Some(row) => PARITY[row][column],
    }
}

/// Coefficients, in the order of `sources`, whose sum of products is shard `want`.
///
/// `sources` are distinct and as many as the code has data shards. Only the missing data shards are solved for: a system
/// of at most [`MISSING_MAX`] unknowns, instead of inverting a matrix of all the sources.
pub(crate) fn coefficients(sources: &[u8], want: u8) -> Row {
    let data_shards = sources.len();
    let want = usize::from(want);
    let mut present = [false; SHARDS_MAX];
    let mut parity = Subset::default();
    for (position, &source) in sources.iter().enumerate() {
        let source = usize::from(source);
        assert!(!present[source], "shard {source} is given twice");
        present[source] = true;
        if source >= data_shards {
            parity.push(position);
        }
    }
    let mut missing = Subset::default();
    (0..data_shards).filter(|&column| !present[column]).for_each(|column| missing.push(column));
    assert_eq!(missing.len, parity.len, "every missing data shard has one parity shard standing in");

    // The wanted shard's share of each missing data shard has to come from the parity sources alone.
    let mut system = [[0; MISSING_MAX + 1]; MISSING_MAX];
    for (equation, &column) in system.iter_mut().zip(missing.items()) {
        for (entry, &position) in equation.iter_mut().zip(parity.items()) {
            *entry = contribution(data_shards, usize::from(sources[position]), column);
        }
        equation[parity.len] = contribution(data_shards, want, column);
    }
    solve(&mut system, parity.len);

    let mut row = [0; SHARDS_MAX];
    for (equation, &position) in system.iter().zip(parity.items()) {
        row[position] = equation[parity.len];
    }
    // A data source adds what the wanted shard has of it, and takes away what the parity sources brought along.
    for (position, &source) in sources.iter().enumerate() {
        let column = usize::from(source);
        if column < data_shards {
            let brought_along = parity.items().iter().fold(0, |sum, &through| {
                sum ^ mul(row[through], contribution(data_shards, usize::from(sources[through]), column))
            });
            row[position] = contribution(data_shards, want, column) ^ brought_along;
        }
    }
    row
}

/// Solves `unknowns` linear equations, each with its right-hand side after its coefficients, and leaves every unknown
/// in the place of the right-hand side.
///
/// Rows need no exchange: pivots vanish only where a leading submatrix is singular, and no square submatrix of
/// [`PARITY`] is.
fn solve(system: &mut [[u8; MISSING_MAX + 1]; MISSING_MAX], unknowns: usize) {
    for pivot in 0..unknowns {
        assert!(system[pivot][pivot] != 0, "a submatrix of the parity matrix is singular");
        let scale = inverse(system[pivot][pivot]);
        system[pivot].iter_mut().for_each(|entry| *entry = mul(*entry, scale));
        let pivot_row = system[pivot];
        for (_, equation) in system[..unknowns].iter_mut().enumerate().filter(|&(index, _)| index != pivot) {
            let factor = equation[pivot];
            equation.iter_mut().zip(pivot_row).for_each(|(entry, above)| *entry ^= mul(factor, above));
        }
    }
}

/// A few indices, on the stack.
#[derive(Default)]
struct Subset {
    indices: [usize; MISSING_MAX],
    len: usize,
}

impl Subset {
    fn push(&mut self, index: usize) {
        self.indices[self.len] = index;
        self.len += 1;
    }

    fn items(&self) -> &[usize] {
        &self.indices[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All shards of a k+m code, as rows over the data shards.
    fn generator(data_shards: usize, parity_shards: usize) -> Vec<Vec<u8>> {
        let identity = (0..data_shards).map(|i| (0..data_shards).map(|j| u8::from(i == j)).collect());
        let parity = PARITY[..parity_shards].iter().map(|row| row[..data_shards].to_vec());
        identity.chain(parity).collect()
    }

    /// Plain Gaussian elimination with row exchanges.
    fn rank(mut rows: Vec<Vec<u8>>) -> usize {
        let mut rank = 0;
        for column in 0..rows[0].len() {
            let Some(pivot) = (rank..rows.len()).find(|&r| rows[r][column] != 0) else { continue };
            rows.swap(rank, pivot);
            let above = rows[rank].clone();
            for row in &mut rows[rank + 1..] {
                let factor = mul(row[column], inverse(above[column]));
                row.iter_mut().zip(&above).for_each(|(entry, a)| *entry ^= mul(factor, *a));
            }
            rank += 1;
        }
        rank
    }

    fn geometries() -> impl Iterator<Item = (usize, usize)> {
        (1..SHARDS_MAX).flat_map(|k| (1..=SHARDS_MAX - k).map(move |m| (k, m)))
    }

    /// Every choice of `k` shards among `k + m`, in ascending order.
    fn survivors(k: usize, m: usize) -> impl Iterator<Item = Vec<u8>> {
        (0u32..1 << (k + m))
            .filter(move |set| set.count_ones() as usize == k)
            .map(move |set| (0..(k + m) as u8).filter(|shard| set >> shard & 1 == 1).collect())
    }

    #[test]
    fn first_row_and_first_column_are_ones() {
        assert_eq!(PARITY[0][..SIDE_MAX], [1; SIDE_MAX]);
        assert!(PARITY.iter().all(|row| row[0] == 1 && row[SIDE_MAX] == 0));
    }

    #[test]
    fn any_k_shards_of_every_code_are_independent() {
        let mut choices = 0;
        for (k, m) in geometries() {
            let generator = generator(k, m);
            for set in survivors(k, m) {
                let rows = set.iter().map(|&shard| generator[usize::from(shard)].clone()).collect();
                assert_eq!(rank(rows), k, "{k}+{m} with {set:?}");
                choices += 1;
            }
        }
        // All subsets of all 2..=16 shards, less the empty and the full ones.
        assert_eq!(choices, (2..=SHARDS_MAX).map(|shards| (1 << shards) - 2).sum());
    }

    #[test]
    fn coefficients_express_every_shard_through_any_k() {
        for (k, m) in geometries() {
            let generator = generator(k, m);
            for set in survivors(k, m) {
                for want in 0..(k + m) as u8 {
                    let row = coefficients(&set, want);
                    let sum = |column: usize| {
                        set.iter()
                            .zip(row)
                            .fold(0, |sum, (&shard, c)| sum ^ mul(c, generator[usize::from(shard)][column]))
                    };
                    let expected = &generator[usize::from(want)];
                    assert!((0..k).all(|column| sum(column) == expected[column]), "{k}+{m}: {want} from {set:?}");
                }
            }
        }
    }

    #[test]
    fn the_order_of_sources_is_the_callers() {
        let row = coefficients(&[5, 0, 4, 2], 3);
        let sorted = coefficients(&[0, 2, 4, 5], 3);
        assert_eq!(row[..4], [sorted[3], sorted[0], sorted[2], sorted[1]]);
    }

    #[test]
    fn a_source_that_is_wanted_is_taken_as_it_is() {
        assert_eq!(coefficients(&[0, 4, 5, 3], 4)[..4], [0, 1, 0, 0]);
        assert_eq!(coefficients(&[0, 4, 5, 3], 3)[..4], [0, 0, 0, 1]);
    }
}
