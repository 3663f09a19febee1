//! Orders of losing and regaining: of two machines that hold all data, a witness, and the link between the two.
//!
//! An order is a few changes, one after the other; each takes something away, or brings it back. Which orders there are, and what
//! must hold after each change, the simulator goes through exhaustively (`crates/sim/tests/two_nodes.rs`); here some of them are
//! drawn, and happen to real processes, etcd and sockets.

use super::fault::Kind;
use super::machine::{Part, Shape};
use anyhow::{Context, Result, ensure};
use holdfast_base::Prng;
use std::fmt;

/// Changes of a drawn order.
const LENGTH: usize = 4;

/// What a change takes away or brings back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// A machine is lost in this way, or is back if it was lost.
    Machine(Kind, Part),
    /// The two machines with data don't reach each other, or do so again.
    Link,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order(pub Vec<Change>);

impl Order {
    /// Reads `kill:h1>cut:w>kill:h1>link`: the second time that a machine is named it comes back.
    pub fn parse(text: &str) -> Result<Order> {
        let change = |word: &str| {
            if word == "link" {
                return Ok(Change::Link);
            }
            let (kind, part) = word.split_once(':').with_context(|| format!("'{word}' is neither link nor kill:h1"))?;
            let kind = [Kind::Kill, Kind::Hang, Kind::Cut].into_iter().find(|known| known.name() == kind);
            let kind = kind.with_context(|| format!("'{word}': machines of an order are lost by kill, hang or cut"))?;
            let part = Part::parse(part).filter(|part| Shape::TWO.parts().contains(part));
            Ok(Change::Machine(kind, part.with_context(|| format!("'{word}': there are h1, h2 and w"))?))
        };
        let changes = text.split('>').map(change).collect::<Result<Vec<_>>>()?;
        let mut lost: Vec<(Kind, Part)> = Vec::new();
        for change in &changes {
            let Change::Machine(kind, part) = *change else { continue };
            match lost.iter().position(|(_, p)| *p == part) {
                Some(at) => {
                    ensure!(lost.remove(at).0 == kind, "'{text}': {part} comes back in the way that it was lost")
                }
                None => lost.push((kind, part)),
            }
        }
        Ok(Order(changes))
    }

    /// So many orders, drawn by the seed.
    pub fn draw(seed: u64, count: usize) -> Vec<Order> {
        let mut prng = Prng::new(seed);
        let mut one = || {
            let mut ways: Vec<(Kind, Part)> = Vec::new();
            let changes = (0..LENGTH).map(|_| {
                let Some(part) = [Some(Part::H1), Some(Part::H2), Some(Part::W), None][prng.below(4) as usize] else {
                    return Change::Link;
                };
                let kind = *prng.pick(&[Kind::Kill, Kind::Hang, Kind::Cut]);
                let at = ways.iter().position(|(_, p)| *p == part);
                // Who is lost comes back in the same way.
                let kind = at.map_or(kind, |at| ways.remove(at).0);
                if at.is_none() {
                    ways.push((kind, part));
                }
                Change::Machine(kind, part)
            });
            Order(changes.collect())
        };
        (0..count).map(|_| one()).collect()
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.0.iter().map(|change| match change {
            Change::Machine(kind, part) => format!("{}:{part}", kind.name()),
            Change::Link => "link".to_string(),
        });
        f.write_str(&words.collect::<Vec<_>>().join(">"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_written_as_they_are_read() {
        for order in Order::draw(7, 50) {
            assert_eq!(Order::parse(&order.to_string()).unwrap(), order);
        }
        assert_ne!(Order::draw(1, 3), Order::draw(2, 3));
        for text in ["", "h1", "kill:n1", "slow:h1", "kill:h1>cut:h1"] {
            assert!(Order::parse(text).is_err(), "{text}");
        }
    }
}
