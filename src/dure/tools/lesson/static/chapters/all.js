import { learning } from "./01_learning.js";
import { gradient } from "./02_gradient.js";
import { copies } from "./03_copies.js";
import { split } from "./04_split.js";
import { apart } from "./05_apart.js";
import { allreduce } from "./06_allreduce.js";
import { order } from "./07_order.js";
import { weights } from "./08_weights.js";
import { nodes } from "./09_nodes.js";
import { speed } from "./10_speed.js";
import { faults } from "./11_faults.js";

export const CHAPTERS = [learning, gradient, copies, split, apart, allreduce, order, weights, nodes, speed, faults];
