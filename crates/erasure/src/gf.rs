//! Arithmetic in GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1.
//!
//! The tables are computed at compile time. The field is part of the on-disk format: the parity of a stored segment
//! means something only under this polynomial.
//!
//! Invariants
//! 1. [`GENERATOR`] generates the whole multiplicative group, so that logarithms exist for every byte but zero
//!    (checked at compile time).

/// The field's reduction polynomial, with its leading x^8 term.
pub(crate) const POLYNOMIAL: u16 = 0x11D;

/// What is added when doubling a byte whose top bit is set: the polynomial without its leading term.
pub(crate) const REDUCTION: u8 = (POLYNOMIAL & 0xFF) as u8;

/// The element whose powers are all bytes but zero: x, that is 2.
pub(crate) const GENERATOR: u8 = 2;

/// The order of the multiplicative group.
const ORDER: usize = 255;

/// Powers of the generator, twice over so that the sum of two logarithms needs no reduction.
static EXP: [u8; 2 * ORDER] = EXP_LOG.0;

/// Logarithms to the base of the generator. The entry of zero is never read.
static LOG: [u8; 256] = EXP_LOG.1;

const EXP_LOG: ([u8; 2 * ORDER], [u8; 256]) = {
    assert!(GENERATOR == 2, "the powers below are made by doubling");
    let mut exp = [0; 2 * ORDER];
    let mut log = [0; 256];
    let mut power: u8 = 1;
    let mut exponent = 0;
    while exponent < ORDER {
        assert!(exponent == 0 || power != 1, "the generator's order is too small");
        exp[exponent] = power;
        exp[exponent + ORDER] = power;
        log[power as usize] = exponent as u8;
        power = double(power);
        exponent += 1;
    }
    assert!(power == 1);
    (exp, log)
};

/// Twice `a`: a shift, reduced without a branch.
pub(crate) const fn double(a: u8) -> u8 {
    (a << 1) ^ ((a as i8 >> 7) as u8 & REDUCTION)
}

/// The product of two field elements.
pub(crate) const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// What `a` is multiplied with to give one. Zero has no inverse.
pub(crate) const fn inverse(a: u8) -> u8 {
    assert!(a != 0, "zero has no inverse");
    EXP[ORDER - LOG[a as usize] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_pairs() -> impl Iterator<Item = (u8, u8)> {
        (0..=255).flat_map(|a| (0..=255).map(move |b| (a, b)))
    }

    /// Schoolbook: multiply as polynomials over GF(2), then divide by the field's and keep the remainder.
    fn mul_by_long_division(a: u8, b: u8) -> u8 {
        let mut product: u32 = 0;
        for i in 0..8 {
            for j in 0..8 {
                product ^= u32::from((a >> i) & (b >> j) & 1) << (i + j);
            }
        }
        for degree in (8..=14).rev() {
            if product >> degree & 1 == 1 {
                product ^= u32::from(POLYNOMIAL) << (degree - 8);
            }
        }
        u8::try_from(product).expect("the remainder has degree 7 at most")
    }

    #[test]
    fn products_are_the_schoolbooks() {
        for (a, b) in all_pairs() {
            assert_eq!(mul(a, b), mul_by_long_division(a, b), "{a} * {b}");
        }
    }

    #[test]
    fn products_and_quotients_are_those_of_another_implementation() {
        for (a, b) in all_pairs() {
            assert_eq!(mul(a, b), reed_solomon_erasure::galois_8::mul(a, b), "{a} * {b}");
            if b != 0 {
                assert_eq!(mul(a, inverse(b)), reed_solomon_erasure::galois_8::div(a, b), "{a} / {b}");
            }
        }
    }

    #[test]
    fn every_byte_but_zero_has_its_inverse() {
        for a in 1..=255 {
            assert_eq!(mul(a, inverse(a)), 1, "{a}");
            assert_eq!(double(a), mul(GENERATOR, a), "{a}");
        }
    }

    #[test]
    #[should_panic(expected = "zero has no inverse")]
    fn zero_has_none() {
        inverse(0);
    }
}
